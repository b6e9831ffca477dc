"""Order that memory forces between ops of one device: what must have ended before an op that needs room can start.

Between F and B of a stage a microbatch holds its activation there and on every earlier stage of the device, or what of
it never leaves. So only so many microbatches are that far at a time, and the next must wait for the first of them
(docs/math/bounds.md, "Precedences that memory forces").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from optpipe.ops import Op
from optpipe.problem import Problem
from optpipe.task_graph import lower
from solver.bounds.device import ended_before, fusing_may_help, usable_bytes
from solver.bounds.unit_costs import UnitCosts


def devices_with_budgets(problem: Problem) -> Iterator[tuple[Sequence[int], int]]:
    """Stages and usable bytes of each device that has a budget."""
    for d, numbers in enumerate(problem.stages_of):
        if numbers and problem.devices[d].memory_bytes is not None:
            yield numbers, int(usable_bytes(problem, d))


def devices_with_order_literals(problem: Problem) -> Iterator[tuple[Sequence[int], int]]:
    """Stages and usable bytes of each device that has a budget and no activation modes.

    Measured, literals for what waits to be recomputed slow proofs down more often than not.
    """
    graph = lower(problem)
    for numbers, budget in devices_with_budgets(problem):
        if not graph.has_modes[list(numbers)].any():
            yield numbers, budget


MOST_ORDER_LITERALS = 50_000
"""Literals up to which a model that orders ops by memory is built in seconds."""


def count_memory_literals(problem: Problem) -> int:
    """Estimate from above of the literals that say how memory orders ops (`cp_sat.memory_order`)."""
    per_pair = sum(len(numbers) ** 2 * 5 for numbers, _ in devices_with_order_literals(problem))
    return per_pair * problem.units**2 // 2


def is_ordered_by_memory(problem: Problem, most_literals: int = MOST_ORDER_LITERALS) -> bool:
    """True if budgets order ops, and by no more than `most_literals`."""
    return 0 < count_memory_literals(problem) <= most_literals


def memory_precedences(problem: Problem) -> Iterator[tuple[Op, Op]]:
    """Pairs of ops of one device without which no budget is kept: the first ends before the second starts.

    Proof. Let stage t be s or before it on the device, and `held` what a microbatch between F and B of t holds at the
    least: what every variant leaves there of t and of all earlier stages of the device. When op x, F or B of (s, j),
    starts, j holds that of the stages before s, and of s what x needs at the least has begun to be there. In the `room`
    left, n = room // held other microbatches can be between F and B of t.
    Those before j whose B of t has not ended are all between the two, since F of s, which comes after F of t, was in
    order: so B(t, j - n - 1) has ended when F(s, j) starts, or all from it on would be n + 1. The same if x is a B,
    and t before s. Those after j are not beyond B of t, which comes after x: so F(t, j + n + 1) has not started when x
    starts, and one op runs at a time. Of a W that has not ended, the microbatch holds `held`, or what W needs if that
    is less; and W of one stage are in order, where none is fused with its B.

    With slices or unequal units, in their given order, the first kind alone, with the sizes of each.
    """
    if not lower(problem).trained.all() or problem.has_free_order:
        return
    costs = UnitCosts.of(problem)
    if not problem.has_equal_microbatches:
        yield from _unit_precedences(costs)
        return
    sizes = costs.staying, costs.whole + costs.beside, costs.at_backward, costs.left
    staying, started, at_backward, left = (of_unit[:, 0].astype(np.int64).tolist() for of_unit in sizes)
    for numbers, budget in devices_with_budgets(problem):
        held = list(accumulate(staying[s] for s in numbers))
        for k, s in enumerate(numbers):
            before = held[k] - staying[s]
            rooms = {"F": budget - before - started[s]}
            if not fusing_may_help(problem, s):
                rooms["B"] = budget - before - at_backward[s]
            for kind, room in rooms.items():
                for t, held_bytes in zip(numbers[: k + 1], held, strict=False):
                    yield from _apart(problem, Op(kind, s, 0), t, room, held_bytes)
                if kind == "F":
                    for u in numbers:
                        if not fusing_may_help(problem, u):
                            least = min(held[0], left[u])
                            yield from _released_first(problem, Op("F", s, 0), Op("W", u, 0), room, least)


def _unit_precedences(costs: UnitCosts) -> Iterator[tuple[Op, Op]]:
    """Backwards, and W, that have ended when an F starts: the first of their order, until the others fit with it."""
    problem = costs.problem
    order, first = problem.units_in_order("B"), np.arange(problem.units) // problem.slice_count * problem.slice_count
    for numbers, budget in devices_with_budgets(problem):
        held = np.cumsum(costs.staying[list(numbers)], axis=0)
        for k, s in enumerate(numbers):
            own = costs.whole[s] + costs.beside[s] + (held[k - 1] if k else 0)
            releases = [("B", t, held[j]) for j, t in enumerate(numbers[: k + 1])]
            releases += [
                ("W", u, np.minimum(held[0], costs.left[u])) for u in numbers if not fusing_may_help(problem, u)
            ]
            for kind, t, sizes in releases:
                counts = ended_before(sizes, budget - own, order)
                # Only the first F that asks for one more; and none that waits for what waits for it.
                for x in np.flatnonzero((np.diff(counts, prepend=0) > 0) & (counts <= first)).tolist():
                    yield Op(kind, t, int(order[counts[x] - 1])), Op("F", s, x)


def _apart(problem: Problem, op: Op, t: int, room: int, held_bytes: int) -> Iterator[tuple[Op, Op]]:
    """Both kinds of pairs of `op`, in every microbatch, with F and B of stage t."""
    if op.kind == "F" or t < op.stage:
        yield from _released_first(problem, op, Op("B", t, 0), room, held_bytes)
    if op.kind == "B" or t < op.stage:
        for before, after in _pairs(problem, room, held_bytes):
            yield op._replace(microbatch=before), Op("F", t, after)


def _released_first(problem: Problem, op: Op, release: Op, room: int, held_bytes: int) -> Iterator[tuple[Op, Op]]:
    for before, after in _pairs(problem, room, held_bytes):
        yield release._replace(microbatch=before), op._replace(microbatch=after)


def _pairs(problem: Problem, room: int, held_bytes: int) -> Iterator[tuple[int, int]]:
    """Microbatches that are one more apart than what fits in `room`; none where the op itself does not fit."""
    if held_bytes > 0 and room >= 0:
        apart = room // held_bytes + 1
        yield from ((j - apart, j) for j in range(apart, problem.units))
