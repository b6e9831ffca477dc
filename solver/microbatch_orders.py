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
    data = problem.to_data()
    factors = data["microbatch_factors"]
    data |= {"microbatch_factors": [factors[i] for i in microbatch_order], "microbatch_order": "given"}
    return problem.from_data(data)


def with_own_numbers(problem: Problem, orders: Orders, microbatch_order: Sequence[int]) -> Orders:
    """Orders of `in_order(problem, microbatch_order)` as orders of the problem."""
    count = problem.slice_count
    units = (np.asarray(microbatch_order)[:, None] * count + np.arange(count)).ravel()

    def own(ops: Sequence[Op]) -> OpArray:
        columns = OpArray.of(ops)
        return OpArray(columns.kind, columns.stage, units[columns.microbatch])

    modes: Ints | None = None
    if orders.modes is not None:
        modes = np.empty_like(orders.modes)
        modes[:, units] = orders.modes
    waits = WaitArray.of(orders.waits)
    return Orders(
        [DeviceOrders(*map(own, device.streams())) for device in orders.devices],
        WaitArray(own(waits.op), own(waits.before)),
        [own(channel) for channel in orders.channels],
        modes,
        list(microbatch_order),
    )
