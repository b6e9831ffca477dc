"""Merged sequences: one list of all ops for each group of devices that share copy channels (usually one device).

A sequence fixes everything that orders fix: the order on every compute stream and copy channel, and the waits. An op
that takes memory waits for the last release of each other stream of its device that stands before it. So, whatever
the timings do, the op that stands last among those that have taken memory finds every release before it done, and
the memory of a device never exceeds the level that is counted along the sequence (the argument of `optpipe.waits`,
with the place in the sequence as the planned time). Budgets are kept by looking at prefixes alone.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
from numba import njit

from optpipe.orders import KINDS as ORDER_KINDS
from optpipe.orders import STREAM_OF_KIND, STREAMS, DeviceOrders, Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.schedule import shared_channels
from optpipe.simulate import Simulation
from solver.search.loops import copy
from solver.search.table import KINDS, NONE, B, Codes, Flags, Floats, Ints, Table, W

FUSED = ORDER_KINDS.index("BW")

KIND_OF_PART = np.array([KINDS.index("B" if kind == "BW" else kind) for kind in ORDER_KINDS])
"""For each kind of op its kind here, for a fused backward that of its first part."""

KIND_OF_ORDERS = np.array([ORDER_KINDS.index(kind) for kind in KINDS])
"""For each kind of op here its place among those of orders."""


class Merged(NamedTuple):
    """The sequences: `ops[first[g] : first[g] + length[g]]` is that of group g; `place[op]` is an index into `ops`."""

    ops: Codes
    length: Ints
    place: Codes


@njit(cache=True)
def size(merged: Merged) -> int:
    """How many ops there are."""
    total = 0
    for count in merged.length:
        total += count
    return total


@njit(cache=True)
def overwrite(source: Merged, target: Merged) -> None:
    """Make sequences equal to others."""
    copy(source.ops, target.ops)
    copy(source.length, target.length)
    copy(source.place, target.place)


def copied(merged: Merged) -> Merged:
    """Sequences of their own."""
    return Merged(merged.ops.copy(), merged.length.copy(), merged.place.copy())


def merge(table: Table, simulation: Simulation) -> Merged:
    """The sequences of simulated orders.

    An op stands where its start is planned, one that only releases where its end is: so the level along a sequence
    is the planned memory, and no wait delays an op at its planned time. Fused backwards are split; where one overtakes
    a W (docs/adr/0006), the W of that stage, which are all alike, change places to be in order.
    """
    ops, key_us, lanes = _numbered(table, simulation)
    for weights in range(W * table.stages, (W + 1) * table.stages):
        mine = ops >> table.shift == weights
        ops[mine] = np.sort(ops[mine])
    return _merge(table, ops, key_us, lanes)


def _numbered(table: Table, simulation: Simulation) -> tuple[Codes, Floats, Ints]:
    """All ops as numbers, the time at which each stands, and the bounds of their lanes (a device's streams)."""
    ops = simulation.ops
    fused = ops.kind == FUSED
    part = np.repeat(np.arange(len(ops)), 1 + fused)
    second = np.diff(part, prepend=-1) == 0
    kind, stage, first = KIND_OF_PART[ops.kind[part]], ops.stage[part], fused[part] & ~second
    kind[second] = W
    of_class = kind * table.stages + stage
    begin, close = simulation.start_us[part], simulation.end_us[part]
    between = begin + table.classes["duration_us"][B * table.stages + stage]
    begin[second], close[first] = between[second], between[first]
    lane = len(STREAMS) * simulation.device[part] + np.asarray(STREAM_OF_KIND)[ops.kind[part]]
    bounds = np.concatenate([[0], 1 + np.flatnonzero(np.diff(lane)), [len(lane)]])
    releases_only = table.classes["releases"] > table.classes["acquires"]
    numbers = of_class << table.shift | ops.microbatch[part]
    return numbers.astype(np.int32), np.where(releases_only[of_class], close, begin), bounds


@njit(cache=True, nogil=True)
def _merge(table: Table, waiting: Codes, key_us: Floats, lanes: Ints) -> Merged:
    """Take, again and again, the earliest op at the head of a lane that depends on nothing still to come.

    At one time releases go before ops that take memory.
    """
    ops = np.full(len(table.classes) * table.microbatches, NONE, np.int32)
    length = np.zeros(len(table.first), np.int64)
    place = np.full(len(table.classes) << table.shift, NONE, np.int32)
    there = np.zeros(len(place), np.bool_)
    for x in waiting:
        there[x] = True
    head = lanes[:-1].copy()
    for _ in range(len(waiting)):
        best = NONE
        for lane in range(len(head)):
            k = head[lane]
            if k == lanes[lane + 1]:
                continue
            if best != NONE:
                late = key_us[k] - key_us[head[best]]
                takes = table.classes[waiting[k] >> table.shift].acquires
                if late > 0 or (late == 0 and takes >= table.classes[waiting[head[best]] >> table.shift].acquires):
                    continue
            if _ready(table, there, place, waiting[k]):
                best = lane
        x = waiting[head[best]]
        head[best] += 1
        g = table.classes[x >> table.shift].group
        place[x] = table.first[g] + length[g]
        ops[place[x]] = x
        length[g] += 1
    return Merged(ops, length, place)


@njit(cache=True)
def _ready(table: Table, there: Flags, place: Codes, x: int) -> bool:
    """Whether everything on other streams that must come before `x` is placed."""
    c, i = x >> table.shift, x & ((1 << table.shift) - 1)
    before = table.classes[c].before
    if before >= 0 and place[before << table.shift | i] < 0:
        return False
    reload = table.classes[c].returns
    return bool(reload < 0 or not there[reload << table.shift | i] or place[reload << table.shift | i] >= 0)


def orders_of(problem: Problem, table: Table, merged: Merged) -> Orders:
    """The orders, channel orders and waits that sequences stand for."""
    groups = zip(table.first.tolist(), merged.length.tolist(), strict=True)
    numbers = np.concatenate([merged.ops[first : first + length] for first, length in groups])
    of_class = numbers >> table.shift
    kind, stage = np.divmod(of_class, table.stages)
    ops = OpArray(KIND_OF_ORDERS[kind], stage, numbers & ((1 << table.shift) - 1))
    stream = np.asarray(STREAM_OF_KIND)[ops.kind]
    lane = len(STREAMS) * table.classes["device"][of_class] + stream
    lanes = len(STREAMS) * len(problem.devices)
    by_lane = np.argsort(lane, kind="stable")
    streams = [ops[places] for places in np.split(by_lane, np.cumsum(np.bincount(lane, minlength=lanes))[:-1])]
    devices = [DeviceOrders(*streams[k : k + len(STREAMS)]) for k in range(0, lanes, len(STREAMS))]
    channels = []
    for served in shared_channels(problem):
        mine = np.isin(lane, [len(STREAMS) * d + STREAMS.index(name) for d, name in served])
        channels.append(ops[np.flatnonzero(mine)])
    return Orders(devices, _waits(table, ops, of_class, lane), [channel for channel in channels if channel])


def _waits(table: Table, ops: OpArray, of_class: Ints, lane: Ints) -> dict[Op, list[Op]]:
    """Each op that takes memory waits for the last release of another stream that nothing before it waited for."""
    waits: dict[Op, list[Op]] = {}
    acquires, releases = (table.classes[name][of_class] > 0 for name in ("acquires", "releases"))
    stream = lane % len(STREAMS)
    for d in np.unique(lane[stream > 0] // len(STREAMS)):
        mine = np.flatnonzero(lane // len(STREAMS) == d)
        for of, others in product(range(len(STREAMS)), repeat=2):
            taking = mine[(stream[mine] == of) & acquires[mine]]
            freeing = mine[(stream[mine] == others) & releases[mine]]
            if of == others or not len(freeing):
                continue
            last = np.searchsorted(freeing, taking) - 1
            new = np.flatnonzero(np.diff(last, prepend=-1))
            pairs = zip(ops[taking[new]], ops[freeing[last[new]]], strict=True)
            for op, release in pairs:
                waits.setdefault(op, []).append(release)
    return waits
