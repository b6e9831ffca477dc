"""Planned times -> orders with waits. The times themselves are left behind: `simulate` makes them."""

from __future__ import annotations

import numpy as np

from optpipe.orders import KINDS, STREAM_OF_KIND, STREAMS, DeviceOrders, OpArray, Orders
from optpipe.problem import Problem
from optpipe.schedule import shared_channels
from optpipe.waits import Times, derive_waits


def orders_of_plan(problem: Problem, planned: Times, tolerance: float = 0.0) -> Orders:
    """Orders, channel orders and waits of a plan that gives every op's start and end.

    A plan is in any unit of time; times that differ by at most `tolerance` count as equal where waits are derived.
    """
    ops = _in_order(planned)
    lists = np.array([stage.device for stage in problem.stages])[ops.stage] * len(STREAMS)
    lists += np.asarray(STREAM_OF_KIND)[ops.kind]
    by_list = np.argsort(lists, kind="stable")
    ends = np.cumsum(np.bincount(lists, minlength=len(problem.devices) * len(STREAMS)))
    streams = [ops[places] for places in np.split(by_list, ends[:-1])]
    devices = [DeviceOrders(*streams[k : k + len(STREAMS)]) for k in range(0, len(streams), len(STREAMS))]
    waits = derive_waits(problem, devices, planned, tolerance)
    channels = []
    for served in shared_channels(problem):
        mine = np.isin(lists, [d * len(STREAMS) + STREAMS.index(stream) for d, stream in served])
        channels.append(ops[np.flatnonzero(mine)])
    return Orders(devices, waits, [channel for channel in channels if channel])


def _in_order(planned: Times) -> OpArray:
    """Ops by time; ops without length at one instant in the order in which a microbatch passes through them."""
    ops = OpArray.of(list(planned))
    start, end = np.array(list(planned.values())).reshape(-1, 2).T
    rank = np.array(["FORBW".index(kind[0]) for kind in KINDS])[ops.kind]
    way = np.where((rank == 0) | (rank == 1), ops.stage, -ops.stage)
    return ops[np.lexsort((ops.microbatch, way, rank, end, start))]
