"""Orders of unequal microbatches to begin with, where a problem leaves their order free.

A problem whose microbatches are put in an order is one in which it is given, so whatever makes schedules of unequal
microbatches serves: its orders name the units by their new places, and are renamed here. Patterns need orders in which
costs repeat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice
from math import gcd
from typing import NamedTuple

import numpy as np

from optpipe import assignment
from optpipe.errors import MethodError
from optpipe.ops import DeviceOrders, Ints, Op, OpArray, Orders, WaitArray
from optpipe.problem import MicrobatchFactors, Problem
from optpipe.stage import UnitFactors


def likely_orders(problem: Problem) -> Iterator[tuple[str, Sequence[int]]]:
    """Names of orders of the microbatches and the orders, without the given one and without repetitions."""
    found = assignment.likely_orders(problem.microbatch_work_us)
    seen = {tuple(range(problem.microbatches))}
    for name, order in found.items():
        if tuple(order) not in seen:
            seen.add(tuple(order))
            yield name, order


def in_order(problem: Problem, microbatch_order: Sequence[int]) -> Problem:
    """The problem whose microbatches are given in this order."""
    own = problem.microbatch_factors
    factors = {} if own is None else {"microbatch_factors": [own[i] for i in microbatch_order]}
    return problem.replaced(microbatch_order="given", **factors)


def with_own_numbers(problem: Problem, orders: Orders, microbatch_order: Sequence[int]) -> Orders:
    """Orders of `in_order(problem, microbatch_order)` as orders of the problem."""
    return _renamed(orders, problem.units_in_order("F", microbatch_order), list(microbatch_order))


def with_numbers_in_order(problem: Problem, orders: Orders) -> Orders:
    """Orders of a problem as orders of `in_order(problem, microbatch_order)`, for their own order of microbatches."""
    return _renamed(orders, np.argsort(problem.units_in_order("F", orders.microbatch_order)), None)


def with_equals_ascending(problem: Problem, orders: Orders) -> Orders:
    """Orders that take as long and need as much, in which equal microbatches run in ascending order."""
    if orders.microbatch_order is None:
        return orders
    classes = problem.unit_class[np.array(orders.microbatch_order) * problem.slice_count]
    ascending = np.empty_like(classes)
    for of_class in np.unique(classes):
        ascending[classes == of_class] = np.flatnonzero(problem.unit_class[:: problem.slice_count] == of_class)
    return with_own_numbers(problem, with_numbers_in_order(problem, orders), ascending.tolist())


def _renamed(orders: Orders, units: Ints, microbatch_order: list[int] | None) -> Orders:
    """Orders in which unit i is called ``units[i]``."""

    def renamed(ops: Sequence[Op]) -> OpArray:
        columns = OpArray.of(ops)
        return OpArray(columns.kind, columns.stage, units[columns.microbatch], columns.passes)

    modes: Ints | None = None
    if orders.modes is not None:
        modes = np.empty_like(orders.modes)
        modes[:, units] = orders.modes
    waits = WaitArray.of(orders.waits)
    return Orders(
        [DeviceOrders(*map(renamed, device.streams())) for device in orders.devices],
        WaitArray(renamed(waits.op), renamed(waits.before)),
        [renamed(channel) for channel in orders.channels],
        modes,
        microbatch_order,
    )


MOST_UNITS = 32
"""Units in a cycle: the time in which a pattern places one grows with the square of what a device runs in it."""


class Cycle(NamedTuple):
    """The first `length` microbatches of an order, whose costs those after them have again and again."""

    length: int
    microbatch_order: Sequence[int]


def cycles(problem: Problem) -> list[Cycle]:
    """Orders of the microbatches in which their costs repeat at least once, one at most where the order is given.

    In a free order those of equal costs are evenly spread over the cycle, or ascend.
    """
    entries = problem.microbatch_factors or [MicrobatchFactors()] * problem.microbatches
    costs = [entry.by_name for entry in entries]
    count, most = len(costs), MOST_UNITS // problem.slice_count
    lengths = (c for c in range(1, min(most, max(1, count // 2)) + 1) if costs[c:] == costs[: count - c])
    orders = [Cycle(c, range(count)) for c in islice(lengths, 1)]
    numbers = Counter(costs)
    rounds = gcd(*numbers.values())
    if problem.has_free_order and rounds > 1 and count // rounds <= most:
        # The j-th of k in a cycle comes in the middle of the j-th of k parts.
        middles = [
            (Fraction(2 * j + 1, 2 * k), cost)
            for cost, number in numbers.items()
            for k in [number // rounds]
            for j in range(k)
        ]
        for cycle in ([cost for _, cost in sorted(middles)], sorted(cost for _, cost in middles)):
            order = _repeated(costs, cycle)
            if all(order != list(other.microbatch_order) for other in orders):
                orders.append(Cycle(len(cycle), order))
    return orders


def _repeated(costs: Sequence[UnitFactors], cycle: Sequence[UnitFactors]) -> list[int]:
    """An order of microbatches in which a cycle of costs repeats, those of equal costs ascending."""
    left = {cost: iter([i for i, other in enumerate(costs) if other == cost]) for cost in set(cycle)}
    return [next(left[cycle[k % len(cycle)]]) for k in range(len(costs))]


def refuse_without_cycle(problem: Problem) -> None:
    """Raise MethodError where the costs of units do not repeat soon enough for a pattern, or modes come on top."""
    if problem.has_equal_microbatches:
        return
    modes = [s for s, stage in enumerate(problem.stages) if stage.modes]
    if modes:
        raise MethodError(
            f"pattern decides on stages[{modes[0]}].modes only where microbatches are whole and alike. "
            "Maybe use search or cp-sat."
        )
    if problem.slice_count > MOST_UNITS:
        raise MethodError(
            f"pattern repeats at most {MOST_UNITS} slices, but slices.count is {problem.slice_count}. "
            "Maybe use search or cp-sat."
        )
    if not cycles(problem):
        most = min(MOST_UNITS // problem.slice_count, problem.microbatches // 2)
        raise MethodError(
            f"pattern needs microbatch_factors that repeat after at most {most} of the {problem.microbatches} "
            "microbatches, and they do not. Maybe use search or cp-sat."
        )
