"""Rules shared by the exact models: precedences, work that memory holds back, order of like W.

Work that memory holds back (docs/math/bounds.md). On a device a microbatch runs F on each of the device's stages,
lowest first, then B, highest first; each W runs any time after its B. How far every microbatch has come says how much
work is done and how many bytes are held.

Order of like W, a symmetry (docs/math/milp.md). On a device, let W of some stages be alike: the same duration, the same
workspace, the same bytes freed at the end. Take a schedule in which B(s, i) ends before B(t, j) and yet W(t, j) runs
before W(s, i). Both B have ended before the earlier of the two W. Exchange the two W: each still follows its B, the
device is busy at the same times, and at any time its memory is as before, since B's end leaves `backward_weight_bytes`
of either and the W take and free the same. Copies are not touched, since they take place before B, and nothing else
needs a W. Sorted so, W of one stage are in the order of their B, which is that of their microbatches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, product
from math import comb, inf
from typing import NamedTuple, TypeVar

import numpy as np

from optpipe.kinds import KIND, needs_of
from optpipe.ops import Op
from optpipe.problem import Problem
from optpipe.task_graph import lower
from solver.bounds.unit_costs import UnitCosts


class State(NamedTuple):
    """Progress of one microbatch on a device: the work done on it, and the least bytes that it holds."""

    work: float
    bytes: float


class LeastWork(NamedTuple):
    """The least work of its device before `op` begins, and from then on."""

    op: Op
    before: float
    after: float


def least_work_around(problem: Problem, length: Callable[[str, int], float]) -> Iterator[LeastWork]:
    """For each F and B on a device with a budget, in the unit of `length` (by kind and stage).

    Proof. When an op of microbatch k begins, microbatches before k have passed this op and later ones have not, since
    they keep their order within each op type of a stage. One op runs at a time, so all others have ended or not begun.
    What the microbatches hold in such states, and what the op itself takes, is within the budget.
    """
    costs = UnitCosts.of(problem)
    of_units = costs.whole + costs.beside, costs.at_backward, costs.staying
    sizes = [of_unit[:, 0].astype(np.int64).tolist() for of_unit in of_units]
    sizes.append(lower(problem).sizes_bytes["backward_weight"][:, 0, 0].tolist())
    for d, stages in enumerate(problem.stages_of):
        budget = problem.devices[d].memory_bytes
        if stages and budget is not None:
            forward, backward, weight = ([length(kind, s) for s in stages] for kind in "FBW")
            path = DevicePath(forward, backward, weight, *([of_stage[s] for s in stages] for of_stage in sizes))
            for (position, s), kind in product(enumerate(stages), "FB"):
                room = budget - path.taken(kind, position)
                step = path.step(kind, position)
                for k in range(problem.units):
                    left = problem.units - k
                    after = left * path.work - path.most_done(step, left - 1, room)
                    yield LeastWork(Op(kind, s, k), path.least_done(step, k, room), after)


@dataclass(frozen=True)
class DevicePath:
    """The F and B that a microbatch runs on one device, by stage, the lowest first.

    `forward`, `backward` and `weight` are times of F, B and W; `started` and `at_backward` the least bytes that are
    there when F and when B have started, `waiting` those in between, `left` those from B to W.

    A step is the number of F and B done, from 0 to twice the number of stages. Between F and B an activation counts as
    the least that any variant leaves on the device, and recomputation takes no time. That relaxes the budget and the
    work, and so keeps both bounds valid.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    started: Sequence[int]
    at_backward: Sequence[int]
    waiting: Sequence[int]
    left: Sequence[int]

    @property
    def work(self) -> float:
        """All work on one microbatch."""
        return sum(self.forward) + sum(self.backward) + sum(self.weight)

    def step(self, kind: str, position: int) -> int:
        """The number of F and B done before F or B of the stage at `position`."""
        return position if kind == "F" else 2 * len(self.forward) - 1 - position

    def taken(self, kind: str, position: int) -> int:
        """Bytes that the op needs at once: its own, or what it leaves if that is more; for B all that came back."""
        return self.started[position] if kind == "F" else self.at_backward[position] - self.waiting[position]

    def least_done(self, step: int, count: int, room: float) -> float:
        """The least work done when one microbatch begins `step` and `count` before it have taken it.

        Of all that they hold at most `room` bytes are on the device (inf where that is impossible).

        Choosing a state for each microbatch is a multiple-choice knapsack. Its linear relaxation starts every
        microbatch in its state of least work and buys bytes along the lower hulls, cheapest work a byte first, the last
        piece in part (Sinha and Zoltners 1979): at most the work of any choice of whole states.
        """
        least = State(0, 0)
        pieces: list[State] = []
        for copies, hull in (
            (count, self._lower_hull(step + 1, 2 * len(self.forward))),
            (1, self._lower_hull(step, step)),
        ):
            least = State(least.work + copies * hull[0].work, least.bytes + copies * hull[0].bytes)
            pieces += [
                State(copies * (b.work - a.work), copies * (a.bytes - b.bytes)) for a, b in pairwise(hull) if copies
            ]
        excess, work = least.bytes - room, least.work
        for piece in sorted(pieces, key=lambda piece: piece.work / piece.bytes):
            if excess <= 0:
                break
            share = min(1.0, excess / piece.bytes)
            excess, work = excess - share * piece.bytes, work + share * piece.work
        return work if excess <= 0 else inf

    def most_done(self, step: int, count: int, room: float) -> float:
        """The most work done on a microbatch that begins `step` and on `count` after it, which have not taken it.

        The same relaxation with the axes exchanged: bytes are spent on work, from the state with the fewest bytes on.
        """
        own = self._done(step)
        hull = _lower_hull(State(state.bytes, -state.work) for state in map(self._done, range(step + 1)))
        room, work = room - own.bytes, own.work - count * hull[0].bytes
        for a, b in pairwise(hull):
            share = min(count * (b.work - a.work), room)
            room, work = room - share, work + share * (a.bytes - b.bytes) / (b.work - a.work)
        return work

    def _done(self, step: int) -> State:
        """After `step` ops of F and B, with every W done that can be."""
        n = len(self.forward)
        backwards = range(2 * n - step, n) if step > n else range(0)
        work = sum(self.forward[:step]) + sum(self.backward[k] + self.weight[k] for k in backwards)
        return State(work, sum(self.waiting[: step if step <= n else 2 * n - step]))

    def _lower_hull(self, first: int, last: int) -> Sequence[State]:
        """The least work for the bytes held, over steps from `first` to `last`; most bytes first."""
        n = len(self.forward)
        states = []
        for step in range(first, last + 1):
            done = self._done(step)
            # Of the W that may be put off, those first that save most work for the bytes they keep: as along a hull,
            # no other choice of them lies below.
            late = [State(self.weight[k], self.left[k]) for k in range(2 * n - step, n) if step > n]
            late.sort(key=lambda piece: piece.work / piece.bytes if piece.bytes else inf, reverse=True)
            states.append(done)
            for work, size in accumulate(late, lambda a, b: State(a.work + b.work, a.bytes + b.bytes)):
                states.append(State(done.work - work, done.bytes + size))
        return _lower_hull(states)


def _lower_hull(states: Iterable[State]) -> list[State]:
    """The lower convex hull from the state of least work on, to ever fewer bytes at ever more work (monotone chain)."""
    hull: list[State] = []
    for state in sorted(states):
        if hull and state.bytes >= hull[-1].bytes:
            continue
        while len(hull) > 1:
            a, b = hull[-2:]
            if (b.work - a.work) * (a.bytes - state.bytes) < (state.work - a.work) * (a.bytes - b.bytes):
                break  # b lies below the line from a to `state`
            hull.pop()
        hull.append(state)
    return hull


class Edge(NamedTuple):
    """`after` starts at least `delay` later than `before` ends (an absent transfer takes no time)."""

    before: int
    after: int
    delay: float


def rule_edges(problem: Problem, index: Mapping[Op, int]) -> Iterator[Edge]:
    """The precedences between the ops of `index`, delays in us; units of one op type of a stage as `units_before` says.

    Zero Bubble, appendix G (F, B, W along the pipeline); OptPipe, section 4 (F, O, R, B of an activation that leaves).
    """
    delays_us = {direction: us.tolist() for direction, us in lower(problem).delays_us.items()}
    passes = set(problem.pass_names)
    earlier = {kind: units_before(problem, kind) for kind in {op.kind[0] for op in index if op.kind not in passes}}
    for op, k in index.items():
        kind, s, i = op
        # Messages first: the order in which a model states its rows decides the path of its solver.
        for need in sorted(needs_of(kind), key=lambda need: need.direction is None) if kind in KIND else ():
            before = Op(need.duty, s + need.stage, i)
            if not need.slice and before in index:
                delay = delays_us[need.direction][min(s, before.stage)][i] if need.direction else 0.0
                yield Edge(index[before], k, delay)
        before_unit = earlier["F" if kind in passes else kind[0]].get(i)
        if before_unit is not None:
            yield Edge(index[Op(kind, s, before_unit)], k, 0.0)
    yield from _spread_edges(problem, index)


def _spread_edges(problem: Problem, index: Mapping[Op, int]) -> Iterator[Edge]:
    """Edges to spread passes and gated ops; a barrier is an edge from the pass on each device."""
    graph = lower(problem)
    waiting = [(one.name, d, d, one.after) for one in graph.passes for d in one.devices]
    waiting += [(kind, s, int(graph.device[s]), lags) for (kind, s), lags in graph.gates.items()]
    for kind, place, device, lags in waiting:
        for lag in lags:
            if lag.spread is not None:
                one = graph.passes[lag.spread]
                befores = [(one.name, d) for d in one.devices]
            else:
                befores = [(lag.duty, lag.stage)]
            own = lag.spread is None and device == graph.device[lag.stage]
            for (before, at), i in product(befores, range(problem.units)):
                if Op(kind, place, i) in index:  # a stage may have gates of copies that it never makes
                    yield Edge(index[Op(before, at, i)], index[Op(kind, place, i)], 0.0 if own else float(lag.us[i]))


def microbatches_in_order(problem: Problem) -> Sequence[Sequence[int]]:
    """Groups of microbatches that run in the order of their group: all of them in one where their order is given.

    Where it is free equal ones form a group. They run in ascending order, since renaming them changes nothing else.
    """
    if not problem.has_free_order:
        return [range(problem.microbatches)]
    groups = defaultdict(list)
    for i, of_class in enumerate(problem.unit_class[:: problem.slice_count].tolist()):
        groups[of_class].append(i)
    return list(groups.values())


def units_before(problem: Problem, kind: str) -> dict[int, int]:
    """The unit right before each in the order of a kind, as far as that is known (`microbatches_in_order`)."""
    groups = microbatches_in_order(problem)
    return {
        after: before for group in groups for before, after in pairwise(problem.units_in_order(kind, group).tolist())
    }


Pair = tuple[Op, Op]
Time = TypeVar("Time", int, float, tuple[float, float], tuple[float, float, int])


def like_weights(problem: Problem, fusing: Collection[int] = ()) -> Iterator[Sequence[int]]:
    """Groups of stages on one device whose W are alike, also those of a single stage.

    Stages that have fused backwards (`fusing`) are left out: their W cannot change places with others.
    """
    graph = lower(problem)
    for stages in problem.stages_of:
        groups = defaultdict(list)
        for s in (s for s in stages if s not in fusing and graph.duties["W"][s].all()):
            types = graph.type_of("W", s, 0, 0) + np.arange(graph.shape[3])
            costs = {*zip(graph.duration_us[types].tolist(), *graph.device_bytes[types].T.tolist(), strict=True)}
            if len(costs) == 1:  # else those of one stage differ already
                groups[costs.pop()].append(s)
        yield from groups.values()


def count_like_pairs(problem: Problem) -> int:
    """Number of `like_pairs`."""
    return sum(comb(len(group), 2) for group in like_weights(problem)) * problem.units**2


def like_pairs(problem: Problem, fusing: Collection[int] = ()) -> Iterator[tuple[Pair, Pair]]:
    """Two B of different stages, and the two W that run in the same order."""
    microbatches = range(problem.units)
    for group in like_weights(problem, fusing):
        for (s, t), i, j in product(combinations(group, 2), microbatches, microbatches):
            yield (Op("B", s, i), Op("B", t, j)), (Op("W", s, i), Op("W", t, j))


def in_weight_order(problem: Problem, starts: Mapping[Op, Time], fusing: Collection[int] = ()) -> dict[Op, Time]:
    """Starts, or starts and ends, of a schedule without fused backwards, with like W sorted so.

    The W of one stage are alike too. Where a fused backward that overtook a W was split (docs/adr/0006), they are out
    of order until they are sorted here.
    """
    result = dict(starts)
    for group in like_weights(problem, fusing):
        both = ([op for op in starts if op.kind == kind and op.stage in group] for kind in "BW")
        backwards, weights = (sorted(ops, key=starts.__getitem__) for ops in both)
        result.update((Op("W", *b[1:]), starts[w]) for b, w in zip(backwards, weights, strict=True))
    return result
