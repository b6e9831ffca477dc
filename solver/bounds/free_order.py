"""Bound on a free order of unequal microbatches: over the choices of the first and the last (docs/math/bounds.md).

In every order one microbatch is the first on all stages and another one the last. These two are enough to chain the
stages together: every F and B waits for that of the first and is followed by that of the last. So each choice of both
gives ops heads and tails, with which every device is bounded as a single machine; the least over all choices counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from optpipe.ops import Floats, Ints
from solver.bounds.unit_costs import UnitCosts
from solver.bounds.unit_order import preemptive_us

MOST_ENTRIES = 2_500_000
"""Most pairs times F of all stages for which heads and tails are computed: some tenths of a second."""

MOST_SCHEDULED = 50_000
"""Most ops over all pairs that are scheduled on their device as a single machine: some tenths of a second."""


def free_order_bound_us(costs: UnitCosts) -> float:
    """The least bound in us over the pairs of a first and a last microbatch; 0 where there are too many."""
    pairs = np.array(list(_pairs(costs)), np.int64)
    if len(pairs) * costs.forward.size > MOST_ENTRIES:
        return 0.0
    ends = _Ends(costs, pairs)
    spans, root = costs.problem.objective == "device_span", costs.problem.stages[0].device
    devices = [numbers for d, numbers in enumerate(costs.problem.stages_of) if numbers and (d == root or not spans)]
    known_us = np.max([ends.least_us(numbers) for numbers in devices], axis=0)
    best_us, scheduled = float("inf"), 0
    for pair in np.argsort(known_us, kind="stable").tolist():
        bound_us = float(known_us[pair])
        if bound_us >= best_us or scheduled > MOST_SCHEDULED:
            return min(best_us, bound_us)
        for numbers in devices:
            if bound_us < best_us:
                bound_us = max(bound_us, preemptive_us(ends.ops(pair, numbers)))
                scheduled += 3 * len(numbers) * costs.problem.units
        best_us = min(best_us, bound_us)
    return best_us


def _pairs(costs: UnitCosts) -> Iterator[tuple[int, int]]:
    """A first and a last microbatch for each pair of classes, and of one class with two microbatches or more."""
    classes = costs.problem.unit_class[:: costs.problem.slice_count]
    members = [np.flatnonzero(classes == number).tolist() for number in np.unique(classes)]
    for one, other in product(members, repeat=2):
        if one is not other:
            yield one[0], other[0]
        elif len(one) > 1:
            yield one[0], one[1]


class _Ends:
    """Heads and tails of F and B, in us: arrays (pairs, stages, microbatches, slices), for each of `pairs`.

    Heads count from the first op of all. Tails count from the end of an op to the end of all, for spans to that of the
    last W of the device of stage 0: read backwards in time they are heads, of which the last microbatch's come first.
    """

    def __init__(self, costs: UnitCosts, pairs: Ints) -> None:
        problem = costs.problem
        self.f, self.b, self.w = f, b, w = [costs.by_slice(us) for us in (costs.forward, costs.backward, costs.weight)]
        ahead, back = (costs.by_slice(problem.unit_delays_us[name]) for name in ("forward", "backward"))
        (first, last), stages = pairs.T, range(len(f))
        shape = len(pairs), *f.shape
        self.heads, self.tails = ({kind: np.zeros(shape) for kind in "FB"} for _ in range(2))
        heads, tails = self.heads, self.tails
        for s in stages:
            least = heads["F"][:, s - 1] + f[s - 1] + ahead[s - 1] if s else heads["F"][:, 0]
            heads["F"][:, s] = _chained(least, f[s], first, last)
        for s in reversed(stages):
            least = heads["F"][:, s] + f[s]
            if s + 1 < len(f):
                least = np.maximum(least, heads["B"][:, s + 1] + b[s + 1] + back[s])
            heads["B"][:, s, :, ::-1] = _chained(least[:, :, ::-1], b[s, :, ::-1], first, last)
        for s in stages:
            counts = problem.objective == "makespan" or problem.stages[s].device == problem.stages[0].device
            least = np.broadcast_to(w[s] * counts, heads["F"][:, s].shape)
            if s:
                least = np.maximum(least, tails["B"][:, s - 1] + b[s - 1] + back[s - 1])
            tails["B"][:, s] = _chained(least, b[s], last, first)
        for s in reversed(stages):
            least = tails["B"][:, s] + b[s]
            if s + 1 < len(f):
                least = np.maximum(least, tails["F"][:, s + 1] + f[s + 1] + ahead[s])
            tails["F"][:, s, :, ::-1] = _chained(least[:, :, ::-1], f[s, :, ::-1], last, first)

    def least_us(self, numbers: Sequence[int]) -> Floats:
        """For each pair the work of the device of the stages `numbers`, with its least head and tail."""
        own, ends = list(numbers), (1, 2, 3)
        head = self.heads["F"][:, own].min(axis=ends)
        span_us = head + sum(float(us[own].sum()) for us in (self.f, self.b, self.w))
        tail = self.tails["B"][:, own].min(axis=ends)
        through_us: Floats = np.maximum(span_us, head + float(self.f[own].sum() + self.b[own].sum()) + tail)
        return through_us

    def ops(self, pair: int, numbers: Sequence[int]) -> list[tuple[float, float, float]]:
        """Head, time and tail of each op of these stages."""
        own = list(numbers)
        ops: list[tuple[float, float, float]] = []
        for kind, us in (("F", self.f), ("B", self.b)):
            columns = self.heads[kind][pair, own], us[own], self.tails[kind][pair, own]
            ops += zip(*(column.ravel().tolist() for column in columns), strict=True)
        weights = (self.heads["B"][pair, own] + self.b[own]).ravel().tolist()
        return ops + [(head, us, 0.0) for head, us in zip(weights, self.w[own].ravel().tolist(), strict=True)]


def _chained(least: Floats, us: Floats, first: Ints, last: Ints) -> Floats:
    """Heads of the ops of one kind on a stage, at least `least`: (pairs, microbatches, slices), slices in their order.

    Those of the `first` microbatch come before all others, and all others before those of the `last`.
    """
    heads, pair = np.array(least), np.arange(len(first))
    for q in range(1, us.shape[1]):
        ended = heads[pair, first, q - 1] + us[first, q - 1]
        heads[pair, first, q] = np.maximum(heads[pair, first, q], ended)
    begun, total = heads[pair, first, 0], us.sum(axis=1)
    heads[:, :, 0] = np.maximum(heads[:, :, 0], (heads[pair, first, -1] + us[first, -1])[:, None])
    heads[pair, first, 0] = begun
    heads[pair, last, 0] = np.maximum(heads[pair, last, 0], begun + total.sum() - total[last])
    for q in range(1, us.shape[1]):
        heads[:, :, q] = np.maximum(heads[:, :, q], heads[:, :, q - 1] + us[:, q - 1])
    return heads
