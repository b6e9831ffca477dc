"""Orders of unequal microbatches to begin with, where a problem leaves their order free.

A problem whose microbatches are put in an order is one in which it is given, so whatever makes schedules of unequal
microbatches serves: its orders name the units by their new places, and are renamed here. Which order is best depends on
where the bubbles are: ascending and descending ones, those that rise and fall, and clusters of similar microbatches
one after another (DynaPipe, EuroSys 2024) are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np

from optpipe.ops import DeviceOrders, Ints, Op, OpArray, Orders, WaitArray
from optpipe.problem import Problem

CLUSTERS = 3
"""Clusters of similar microbatches, of which every order is tried."""


def likely_orders(problem: Problem) -> Iterator[tuple[str, Sequence[int]]]:
    """Names of orders of the microbatches and the orders, without the given one and without repetitions."""
    entries = problem.microbatch_factors or []
    times = np.array([entry.time for entry in entries])
    up = np.argsort(times, kind="stable")
    found = {
        "ascending": up,
        "descending": up[::-1],
        "rising and falling": np.concatenate([up[::2], up[1::2][::-1]]),
        "falling and rising": np.concatenate([up[::2][::-1], up[1::2]]),
    }
    # By time, in parts of equal range; in a cluster microbatches stay as given.
    edges = np.linspace(times.min(), times.max(), CLUSTERS + 1)[1:-1]
    clusters = [np.flatnonzero(np.searchsorted(edges, times) == k) for k in range(CLUSTERS)]
    for numbers in permutations(range(CLUSTERS)):
        found[f"clusters {numbers}"] = np.concatenate([clusters[k] for k in numbers])
    seen = {tuple(range(problem.microbatches))}
    for name, order in found.items():
        if tuple(order.tolist()) not in seen:
            seen.add(tuple(order.tolist()))
            yield name, order.tolist()


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
