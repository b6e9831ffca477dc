"""Merged sequences of the annealer, the problem as tables, and small loops for compiled code.

A sequence fixes everything that orders fix: the order on every compute stream and copy channel, and the waits. An op
that takes memory waits for the last release of each other stream of its device that stands before it. So, whatever
the timings do, the op that stands last among those that have taken memory finds every release before it done, and
the memory of a device never exceeds the level that is counted along the sequence (the argument of `optpipe.memory`,
with the place in the sequence as the planned time). So a budget is kept if every prefix keeps it, whatever the times.

An op is ``class << shift | microbatch`` with ``class = kind * stages + stage``, kinds in the order of KINDS. A fused
backward is a B with its W right behind it. A *group* is the devices that share copy channels, usually one device.

Random numbers are xorshift (Marsaglia 2003), since numba's own generator belongs to a thread: this one belongs to a
search, so that a seed gives one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.costs import device_effect
from optpipe.ops import KINDS as ORDER_KINDS
from optpipe.ops import STREAM_OF_KIND, STREAMS, DeviceOrders, Floats, Ints, Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.schedule import shared_channels
from optpipe.simulate import Simulation

Codes = NDArray[np.int32]
Flags = NDArray[np.bool_]
Records = NDArray[Any]

KINDS = "FBWOR"
F, B, W, O, R = range(len(KINDS))  # noqa: E741 (the field's names for ops)
NONE = -1
"""No class, or the place of an op that is in no sequence."""

MARKS = 48
"""Largest number of marks of a sweep, the positions at which it can resume."""

NO_BUDGET = np.iinfo(np.int64).max // 4
"""The budget of a device without one: no sum of bytes reaches it, and sums with it stay whole numbers of 64 bits."""

_CLASS = np.dtype(
    [
        ("device", np.int32),
        ("group", np.int32),
        ("stream", np.int32),  # a device's compute stream has its number; channels follow, two a group
        ("acquires", np.int32),
        ("releases", np.int32),
        ("before", np.int32),  # the class whose op of the same microbatch must end `delay_us` before, on another stream
        ("returns", np.int32),  # for B: the class of its R
        ("after", np.int32),  # whose `before` or `returns` this is, O aside
        ("leaves", np.int32),  # for F: the class of its O
        ("duration_us", np.float64),
        ("delay_us", np.float64),
        ("after_us", np.float64),  # the delay to `after`
        ("need_bytes", np.int64),  # the most that it adds while it runs or at its end
        ("change_bytes", np.int64),  # what it leaves behind
    ]
)


class Table(NamedTuple):
    """Constants of a problem. `classes`: one record a class.

    `first`: by group, where its part of the sequence array begins. `alone`: by group, its device if it has one only.
    `step`: ops from one mark of a sweep to the next. `offloadable`: the stages that may offload.
    """

    shift: int
    stages: int
    microbatches: int
    devices: int
    streams: int
    step: int
    spans: bool
    classes: Records
    first: Ints
    alone: Ints
    budget_bytes: Ints
    offloadable: Ints


def build_table(problem: Problem) -> Table:
    """Build the constants of a problem."""
    count, m = len(problem.stages), problem.units
    classes = _classes(problem)
    capacity = np.bincount(classes["group"], minlength=len(problem.channel_groups)) * m
    offloadable = [s for s, stage in enumerate(problem.stages) if stage.offload]
    return Table(
        shift=max(m - 1, 1).bit_length(),
        stages=count,
        microbatches=m,
        devices=len(problem.devices),
        streams=len(problem.devices) + 2 * len(problem.channel_groups),
        step=(3 * count + 2 * len(offloadable)) * m // MARKS + 1,
        spans=problem.objective == "device_span",
        classes=classes,
        first=np.concatenate([[0], np.cumsum(capacity)[:-1]]).astype(np.int64),
        alone=np.array([g[0] if len(g) == 1 else NONE for g in problem.channel_groups], np.int64),
        budget_bytes=budgets_bytes(problem),
        offloadable=np.array(offloadable, np.int64),
    )


def budgets_bytes(problem: Problem) -> Ints:
    """For each device its budget, `NO_BUDGET` where there is none."""
    return np.array([NO_BUDGET if d.memory_bytes is None else d.memory_bytes for d in problem.devices], np.int64)


def _classes(problem: Problem) -> Records:
    stages, count, devices = problem.stages, len(problem.stages), len(problem.devices)
    group_of = {d: g for g, members in enumerate(problem.channel_groups) for d in members}
    classes = np.zeros(len(KINDS) * count, _CLASS)
    for c, record in enumerate(classes):
        kind, stage = KINDS[c // count], stages[c % count]
        effect = device_effect(stage, kind)
        group = group_of[stage.device]
        channel = devices + 2 * group + int(kind == "R" and problem.copy_channels.duplex)
        record["device"], record["group"] = stage.device, group
        record["stream"] = stage.device if kind in "FBW" else channel
        record["acquires"], record["releases"] = effect.acquires, effect.releases
        record["duration_us"] = 0.0 if kind in "OR" and stage.offload is None else stage.duration_us(kind)
        record["need_bytes"] = max(effect.at_start, sum(effect))
        record["change_bytes"] = sum(effect)
    for name in ("before", "returns", "after", "leaves"):
        classes[name] = NONE

    def follow(after: int, before: int, delays_us: Sequence[float]) -> None:
        """Relate neighbouring stages, from two first classes on."""
        for k, delay_us in enumerate(delays_us):
            classes["before"][after + k], classes["after"][before + k] = before + k, after + k
            classes["delay_us"][after + k] = classes["after_us"][before + k] = delay_us

    follow(F * count + 1, F * count, problem.forward_delay_us)
    follow(B * count, B * count + 1, problem.backward_delay_us)
    for s, stage in enumerate(problem.stages):
        out, back = O * count + s, R * count + s
        classes["before"][out], classes["before"][back], classes["after"][out] = s, out, back
        if stage.offload:
            classes["leaves"][s] = out
            classes["returns"][B * count + s], classes["after"][back] = back, B * count + s
    return classes


FUSED = ORDER_KINDS.index("BW")

KIND_OF_PART = np.array([KINDS.find("B" if kind == "BW" else kind) for kind in ORDER_KINDS])
"""For each kind of orders its kind in sequences, for a fused backward that of its first part; -1 for recomputation."""

KIND_OF_ORDERS = np.array([ORDER_KINDS.index(kind) for kind in KINDS])
"""For each kind of sequences its index among those of orders."""


class Merged(NamedTuple):
    """The sequences: `ops[first[g] : first[g] + length[g]]` is that of group g; `place[op]` is an index into `ops`."""

    ops: Codes
    length: Ints
    place: Codes


@njit(cache=True)
def size(merged: Merged) -> int:
    """Number of ops."""
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
    """A copy that shares no array."""
    return Merged(merged.ops.copy(), merged.length.copy(), merged.place.copy())


def merge(table: Table, simulation: Simulation) -> Merged:
    """The sequences of simulated orders.

    An op stands where its start is planned, one that only releases where its end is: so the level along a sequence
    is the planned memory, and no wait delays an op at its planned time. Fused backwards are split; where one overtakes
    a W (docs/adr/0006), the W of that stage, which are all alike, change places to be in order.
    """
    ops = simulation.ops
    fused = ops.kind == FUSED
    part = np.repeat(np.arange(len(ops)), 1 + fused)  # a fused backward twice: B, then W
    second = np.diff(part, prepend=-1) == 0
    kind, stage, first = KIND_OF_PART[ops.kind[part]], ops.stage[part], fused[part] & ~second
    kind[second] = W
    of_class = kind * table.stages + stage
    start_us, end_us = simulation.start_us[part], simulation.end_us[part]
    between_us = start_us + table.classes["duration_us"][B * table.stages + stage]
    start_us[second], end_us[first] = between_us[second], between_us[first]
    releases_only = table.classes["releases"] > table.classes["acquires"]
    key_us = np.where(releases_only[of_class], end_us, start_us)
    lane = len(STREAMS) * simulation.device[part] + np.asarray(STREAM_OF_KIND)[ops.kind[part]]
    lanes = np.concatenate([[0], 1 + np.flatnonzero(np.diff(lane)), [len(lane)]])
    codes = (of_class << table.shift | ops.microbatch[part]).astype(np.int32)
    for weights in range(W * table.stages, (W + 1) * table.stages):
        of_stage = codes >> table.shift == weights
        codes[of_stage] = np.sort(codes[of_stage])
    return _merge(table, codes, key_us, lanes)


@njit(cache=True, nogil=True)
def _merge(table: Table, waiting: Codes, key_us: Floats, lanes: Ints) -> Merged:
    """Merge lanes (the streams of devices): take the earliest op at the head of one that depends on nothing to come.

    At one time releases go before ops that take memory.
    """
    ops = np.full(len(table.classes) * table.microbatches, NONE, np.int32)
    length = np.zeros(len(table.first), np.int64)
    place = np.full(len(table.classes) << table.shift, NONE, np.int32)
    present = np.zeros(len(place), np.bool_)
    for x in waiting:
        present[x] = True
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
            if _ready(table, present, place, waiting[k]):
                best = lane
        x = waiting[head[best]]
        head[best] += 1
        g = table.classes[x >> table.shift].group
        place[x] = table.first[g] + length[g]
        ops[place[x]] = x
        length[g] += 1
    return Merged(ops, length, place)


@njit(cache=True)
def _ready(table: Table, present: Flags, place: Codes, x: int) -> bool:
    """True if everything on other streams that must come before `x` is placed."""
    c, i = x >> table.shift, x & ((1 << table.shift) - 1)
    before = table.classes[c].before
    if before >= 0 and place[before << table.shift | i] < 0:
        return False
    reload = table.classes[c].returns
    return bool(reload < 0 or not present[reload << table.shift | i] or place[reload << table.shift | i] >= 0)


def orders_from_sequences(problem: Problem, table: Table, merged: Merged) -> Orders:
    """The orders, channel orders and waits that sequences stand for."""
    groups = zip(table.first.tolist(), merged.length.tolist(), strict=True)
    codes = np.concatenate([merged.ops[first : first + length] for first, length in groups])
    of_class = codes >> table.shift
    kind, stage = np.divmod(of_class, table.stages)
    ops = OpArray(KIND_OF_ORDERS[kind], stage, codes & ((1 << table.shift) - 1))
    stream = np.asarray(STREAM_OF_KIND)[ops.kind]
    lane = len(STREAMS) * table.classes["device"][of_class] + stream
    lanes = len(STREAMS) * len(problem.devices)
    by_lane = np.argsort(lane, kind="stable")
    streams = [ops[places] for places in np.split(by_lane, np.cumsum(np.bincount(lane, minlength=lanes))[:-1])]
    devices = [DeviceOrders(*streams[k : k + len(STREAMS)]) for k in range(0, lanes, len(STREAMS))]
    channels = []
    for served in shared_channels(problem):
        on_channel = np.isin(lane, [len(STREAMS) * d + STREAMS.index(name) for d, name in served])
        channels.append(ops[np.flatnonzero(on_channel)])
    return Orders(devices, _waits(table, ops, of_class, lane), [channel for channel in channels if channel])


def _waits(table: Table, ops: OpArray, of_class: Ints, lane: Ints) -> dict[Op, list[Op]]:
    """Each op that takes memory waits for the last release before it on each other stream of its device.

    Where an earlier op of its stream already waits for that release, the wait is implied and left out.
    """
    waits: dict[Op, list[Op]] = {}
    acquires, releases = (table.classes[name][of_class] > 0 for name in ("acquires", "releases"))
    stream = lane % len(STREAMS)
    for d in np.unique(lane[stream > 0] // len(STREAMS)):
        of_device = np.flatnonzero(lane // len(STREAMS) == d)
        for own, other in product(range(len(STREAMS)), repeat=2):
            taking = of_device[(stream[of_device] == own) & acquires[of_device]]
            freeing = of_device[(stream[of_device] == other) & releases[of_device]]
            if own == other or not len(freeing):
                continue
            last = np.searchsorted(freeing, taking) - 1
            new = np.flatnonzero(np.diff(last, prepend=-1))
            pairs = zip(ops[taking[new]], ops[freeing[last[new]]], strict=True)
            for op, release in pairs:
                waits.setdefault(op, []).append(release)
    return waits


Array = NDArray[Any]


@njit(cache=True)
def copy(source: Array, target: Array) -> None:
    """Copy one array over another of the same length."""
    for k in range(len(source)):
        target[k] = source[k]


@njit(cache=True)
def fill(target: Array, value: float) -> None:
    """Set every element."""
    for k in range(len(target)):
        target[k] = value


@njit(cache=True)
def equal(one: Array, other: Array) -> bool:
    """True if two arrays of the same length are equal."""
    for k in range(len(one)):  # noqa: SIM110 (numba compiles no all())
        if one[k] != other[k]:
            return False
    return True


Word = NDArray[np.uint64]
"""One element, not 0."""


@njit(cache=True)
def _next(state: Word) -> np.uint64:
    x: np.uint64 = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return x


@njit(cache=True)
def below(state: Word, limit: int) -> int:
    """A random integer from 0 to ``limit - 1``."""
    return int(np.int64(_next(state) >> np.uint64(33))) % limit


@njit(cache=True)
def unit(state: Word) -> float:
    """A random number in [0, 1)."""
    return float(_next(state) >> np.uint64(11)) * 2.0**-53
