"""Planned times -> orders with waits. The times themselves are left behind: `simulate` makes them."""

from __future__ import annotations

from collections.abc import Iterable

from optpipe.orders import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.schedule import shared_channels
from optpipe.waits import Times, derive_waits


def orders_of_plan(problem: Problem, planned: Times, tolerance: float = 0.0) -> Orders:
    """Orders, channel orders and waits of a plan that gives every op's start and end.

    A plan is in any unit of time; times that differ by at most `tolerance` count as equal where waits are derived.
    """
    devices = [DeviceOrders(*_streams(problem, planned, d)) for d in range(len(problem.devices))]
    waits = derive_waits(problem, devices, planned, tolerance)
    channels = [
        _in_order([op for d, stream in lists for op in getattr(devices[d], stream)], planned)
        for lists in shared_channels(problem)
    ]
    return Orders(devices, waits, [channel for channel in channels if channel])


def _streams(problem: Problem, planned: Times, device: int) -> list[list[Op]]:
    mine = [op for op in planned if problem.stages[op.stage].device == device]
    return [
        _in_order((op for op in mine if op.stream == stream), planned) for stream in ("compute", "offload", "reload")
    ]


def _in_order(ops: Iterable[Op], planned: Times) -> list[Op]:
    """Ops by time; ops without length at one instant in the order in which a microbatch passes through them."""

    def place(op: Op) -> tuple[float, float, int, int, int]:
        way = op.stage if op.kind in "FO" else -op.stage
        return (*planned[op], "FORBW".index(op.kind[0]), way, op.microbatch)

    return sorted(ops, key=place)
