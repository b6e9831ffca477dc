"""Orders of unequal microbatches to begin with, where a problem leaves their order free.

A problem whose microbatches are put in an order is one in which it is given, so whatever makes schedules of unequal
microbatches serves: its orders name the units by their new places, and are renamed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from optpipe import assignment
from optpipe.ops import DeviceOrders, Ints, Op, OpArray, Orders, WaitArray
from optpipe.problem import Problem


def likely_orders(problem: Problem) -> Iterator[tuple[str, Sequence[int]]]:
    """Names of orders of the microbatches and the orders, without the given one and without repetitions."""
    found = assignment.likely_orders([entry.time for entry in problem.microbatch_factors or []])
    seen = {tuple(range(problem.microbatches))}
    for name, order in found.items():
        if tuple(order) not in seen:
            seen.add(tuple(order))
            yield name, order


def in_order(problem: Problem, microbatch_order: Sequence[int]) -> Problem:
    """The problem whose microbatches are given in this order."""
    data = problem.to_data() | {"microbatch_order": "given"}
    if problem.microbatch_factors is not None:
        data["microbatch_factors"] = [data["microbatch_factors"][i] for i in microbatch_order]
    return problem.from_data(data)


def with_own_numbers(problem: Problem, orders: Orders, microbatch_order: Sequence[int]) -> Orders:
    """Orders of `in_order(problem, microbatch_order)` as orders of the problem."""
    return _renamed(orders, problem.units_in_order("F", microbatch_order), list(microbatch_order))


def with_numbers_in_order(problem: Problem, orders: Orders) -> Orders:
    """Orders of a problem as orders of `in_order(problem, microbatch_order)`, for their own order of microbatches."""
    return _renamed(orders, np.argsort(problem.units_in_order("F", orders.microbatch_order)), None)


def _renamed(orders: Orders, units: Ints, microbatch_order: list[int] | None) -> Orders:
    """Orders in which unit i is called ``units[i]``."""

    def renamed(ops: Sequence[Op]) -> OpArray:
        columns = OpArray.of(ops)
        return OpArray(columns.kind, columns.stage, units[columns.microbatch])

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
