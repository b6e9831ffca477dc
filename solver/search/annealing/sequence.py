"""Merged sequences of the annealer, and small loops for compiled code.

A sequence fixes everything that orders fix: the order on every compute stream and copy channel, and the waits. An op
that takes memory waits for the last release of each other stream of its device that stands before it. So, whatever
the timings do, the op that stands last among those that have taken memory finds every release before it done, and
the memory of a device never exceeds the level that is counted along the sequence (the argument of `optpipe.memory`,
with the place in the sequence as the planned time). So a budget is kept if every prefix keeps it, whatever the times.

Where pairs of stages may run as one block (`Problem.overlaps`), an F of option 1 *joins*: it is one block with the
backward right behind it if they may be one, and with the W of that, which stands behind both. So a block is a matter of
places, and whatever comes between its ops parts them. Its F takes the time of the block and waits for what either op
needs, its B and W take none (`Merged.block_us`). Problems with activation modes have no blocks here.

Numba leaves out a branch on an argument that is None, with all that is called there: so functions for blocks alone
take `block_us`.

Random numbers are xorshift (Marsaglia 2003), since numba's own generator belongs to a thread: this one belongs to a
search, so that a seed gives one run.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.kinds import CODE, ROWS, STREAMS, WHOLE_BACKWARD, codes, covering, kind_of
from optpipe.mode_names import OFFLOAD
from optpipe.ops import DeviceOrders, Floats, Ints, Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.schedule import shared_channels
from optpipe.simulate import Simulation
from solver.search.annealing.links import Codes, PassClasses, first_needed
from solver.search.annealing.table import KINDS, NONE, B, C, F, Table, W, options_of_stage

Flags = NDArray[np.bool_]

FUSED = [*codes(covering("B", "W"))]

BACKWARD_INSIDE = CODE[kind_of("B", "C")]

WHOLE = np.arange(len(ROWS))
WHOLE[[*codes(WHOLE_BACKWARD)]] = codes(WHOLE_BACKWARD.values())
"""For each kind of orders that of the op on a stage that cannot split its backwards."""

KIND_OF_PART = np.array([KINDS.find(row.duties[0]) for row in ROWS])
"""For each kind of orders its kind in sequences, for a fused backward that of its first part."""

KIND_OF_ORDERS = np.array(codes(KINDS))
"""For each kind of sequences its index among those of orders."""


class Merged(NamedTuple):
    """The sequences: `ops[first[g] : first[g] + length[g]]` is that of group g; `place[op]` is an index into `ops`.

    `block_us[op]`: what an op of a block adds to its device's time, all of it with its F; below 0 for other ops. Where
    there are no blocks it is None, for which kernels are compiled without them: with a further array in the arguments
    of every function annealing took a fifth longer.
    """

    ops: Codes
    length: Ints
    place: Codes
    block_us: Floats | None


@njit(cache=True)
def time_in_block(block_us: Floats | None, x: int) -> float:
    """Compute what an op in a block adds to its device's time; below 0 for an op in none."""
    if block_us is None:
        return -1.0
    return float(block_us[x])


@njit(cache=True)
def set_time_in_block(block_us: Floats | None, x: int, time_us: float) -> None:
    """Note what an op in a block adds to its device's time."""
    if block_us is not None:
        block_us[x] = time_us


@njit(cache=True)
def time_of_pair(block_us: Floats | None, f: int, b: int) -> float:
    """Time of a block by the stages of its forward and its backward, for units of factor 1; below 0 for none."""
    if block_us is None:
        return -1.0
    return float(block_us[f, b])


@njit(cache=True)
def block_at(table: Table, merged: Merged, q: int, block_us: Floats | None) -> float:
    """Time of the block that begins at a place; below 0 if none does. `block_us`: that of the table."""
    if block_us is None:
        return NONE
    code, keys, mask = merged.ops[q], table.key_mask, (1 << table.shift) - 1
    x = code & keys
    f = x >> table.shift
    if f >= table.stages or (code >> table.option_shift) % table.options == 0 or q + 1 == len(merged.ops):
        return NONE
    other = merged.ops[q + 1]
    y = other & keys
    b = (y >> table.shift) - B * table.stages
    if other < 0 or merged.place[y] != q + 1 or b < 0 or b >= table.stages or x & mask == y & mask:
        return NONE
    w = merged.place[y + (table.stages << table.shift)]
    if w >= 0 and w != q + 2:
        return NONE
    first, last = table.classes[code >> table.shift], table.classes[other >> table.shift]
    return float(time_of_pair(block_us, f, b) * max(first.factor, last.factor))


@njit(cache=True)
def note_blocks(table: Table, merged: Merged, begin: int, end: int) -> None:
    """Set the times in blocks of the ops at these places, which belong to one group."""
    if not table.has_blocks:
        return
    for q in range(begin, end):
        set_time_in_block(merged.block_us, merged.ops[q] & table.key_mask, NONE)
    for q in range(max(begin - 2, 0), end):
        time_us = block_at(table, merged, q, table.block_us)
        if time_us >= 0:
            backward = merged.ops[q + 1] & table.key_mask
            set_time_in_block(merged.block_us, merged.ops[q] & table.key_mask, time_us)
            set_time_in_block(merged.block_us, backward, 0.0)
            set_time_in_block(merged.block_us, backward + (table.stages << table.shift), 0.0)


@njit(cache=True)
def variable(value: int) -> int:
    """The value itself: numba compiles a function once more for each literal that it is called with."""
    return int(value)


@njit(cache=True)
def size(merged: Merged) -> int:
    """Number of ops."""
    total = 0
    for count in merged.length:
        total += count
    return total


@njit(cache=True)
def _copy_times(source: Floats | None, target: Floats | None) -> None:
    if source is not None:  # noqa: SIM102 (numba leaves out a branch on None alone)
        if target is not None:
            copy(source, target)


@njit(cache=True)
def overwrite(source: Merged, target: Merged) -> None:
    """Make sequences equal to others."""
    copy(source.ops, target.ops)
    copy(source.length, target.length)
    copy(source.place, target.place)
    _copy_times(source.block_us, target.block_us)


def copied(merged: Merged) -> Merged:
    """A copy that shares no array."""
    block_us = None if merged.block_us is None else merged.block_us.copy()
    return Merged(merged.ops.copy(), merged.length.copy(), merged.place.copy(), block_us)


def merge(table: Table, simulation: Simulation) -> Merged:
    """The sequences of simulated orders.

    An op stands where its start is planned, one that only releases where its end is: so the level along a sequence
    is the planned memory, and no wait delays an op at its planned time. Fused backwards are split where they can be;
    where one overtakes a W (docs/adr/0006), the W of that stage change places to be in order.
    """
    problem, ops = simulation.problem, simulation.ops
    numbers = PassClasses.of(problem, len(KINDS) * table.stages)
    of_stages, spread = np.where(ops.spread, 0, ops.stage), ops.spread
    fused = np.isin(ops.kind, FUSED) & np.array([stage.split_backward for stage in problem.stages])[of_stages]
    part = np.repeat(np.arange(len(ops)), 1 + fused)  # a fused backward twice: B, then W
    second = np.diff(part, prepend=-1) == 0
    kind, stage, first = KIND_OF_PART[np.where(spread, 0, ops.kind)[part]], of_stages[part], fused[part] & ~second
    kind[second] = W
    spread = spread[part]
    units = ops.microbatch[part]
    joined = _blocks(simulation)
    block = joined[part]
    option = np.where((kind == W) | spread, 0, _options_taken(table, simulation, joined)[stage, units])
    above = (problem.unit_class * table.options) << (table.option_shift - table.shift)
    of_pass = numbers.of_pass(ops.kind[part] - len(ROWS), ops.stage[part])
    of_class = above[units] + (option << (table.option_shift - table.shift))
    of_class |= np.where(spread, of_pass, kind * table.stages + stage)
    start_us, end_us = simulation.start_us[part], simulation.end_us[part]
    between_us = start_us + table.classes["duration_us"][np.where(first, of_class, 0)]
    between_us[block] = start_us[block]
    start_us[second] = end_us[first] = between_us[first]
    releases_only = table.classes["releases"] > table.classes["acquires"]
    key_us = np.where(releases_only[of_class] & ~block, end_us, start_us)  # nothing comes between the ops of a block
    lane = len(STREAMS) * simulation.device[part] + ops.stream[part]
    lanes = [0, *(1 + np.flatnonzero(np.diff(lane))).tolist(), len(lane)]
    forwards = ops.microbatch[(ops.kind == F) & (ops.stage == 0)]  # in the order in which they run
    codes = (of_class << table.shift | np.argsort(forwards)[units]).astype(np.int32)
    backward_place = np.argsort(problem.units_in_order("W", forwards[:: table.slices] // table.slices))[units]
    for s in range(table.stages):
        of_stage = np.flatnonzero((kind == W) & (stage == s))
        codes[of_stage] = codes[of_stage[np.argsort(backward_place[of_stage])]]
    for number in numbers.barriers:
        members, latest_us = ops.kind == len(ROWS) + number, np.zeros(problem.units)
        np.maximum.at(latest_us, ops.microbatch[members], simulation.end_us[members])
        of_units = (above[forwards] | numbers.barrier(number)) << table.shift | np.arange(problem.units)
        codes, key_us = np.append(codes, of_units.astype(np.int32)), np.append(key_us, latest_us[forwards])
        lanes.append(len(codes))
    ops_in_place, length_of, place = _merge(table, codes, key_us, np.array(lanes))
    merged = Merged(ops_in_place, length_of, place, np.full(len(place), -1.0) if table.has_blocks else None)
    for begin, length in zip(table.first.tolist(), merged.length.tolist(), strict=True):
        note_blocks(table, merged, begin, begin + length)
    return merged


def _blocks(simulation: Simulation) -> Flags:
    """Mask of the ops that run in a block: an F and the backward right behind it, which start together."""
    ops, start_us = simulation.ops, simulation.start_us
    pairs = (np.diff(simulation.device) == 0) & (np.diff(start_us) == 0)
    pairs &= (ops.kind[:-1] == F) & (ops.kind[1:] == CODE[kind_of("B", "W")])
    joined = np.zeros(len(ops), bool)
    joined[:-1] |= pairs
    joined[1:] |= pairs
    return joined


def _options_taken(table: Table, simulation: Simulation, joined: Flags) -> Ints:
    """The option of each activation, of shape (stages, units). An F joins unless the backward behind it is apart."""
    problem, ops = simulation.problem, simulation.ops
    size = len(problem.stages), problem.units
    taken = np.zeros(size, np.int64)
    if table.has_blocks:
        backward = np.isin(ops.kind, codes(covering("B")))
        joins = joined | ~np.append(backward[1:], False)
        joins &= ops.kind == F
        taken[ops.stage[joins], ops.microbatch[joins]] = 1
    if not problem.has_modes:
        return taken
    present = np.zeros((len(ROWS), *size), bool)
    of_stages = ops[np.flatnonzero(~ops.spread)]
    present[of_stages.kind, of_stages.stage, of_stages.microbatch] = True
    inside = present[BACKWARD_INSIDE] | present[CODE[kind_of("B", "W", "C")]]
    for s, stage in enumerate(problem.stages):
        copied = present[CODE["O"], s] * stage.choice_numbers.get(OFFLOAD, 0)
        modes = copied if simulation.modes is None else simulation.modes[s]
        for n, option in enumerate(options_of_stage(problem, s)):
            taken[s, (modes == option.choice) & (inside[s] == option.inside)] = n
    return taken


@njit(cache=True, nogil=True)
def _merge(table: Table, waiting: Codes, key_us: Floats, lanes: Ints) -> tuple[Codes, Ints, Codes]:
    """Merge lanes (the streams of devices): take the earliest op at the head of one that depends on nothing to come.

    At one time releases go before ops that take memory.
    """
    ops = np.full(table.keys * table.units, NONE, np.int32)
    length = np.zeros(len(table.first), np.int64)
    place = np.full(table.keys << table.shift, NONE, np.int32)
    present = np.zeros(len(place), np.bool_)
    for code in waiting:
        present[code & table.key_mask] = True
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
            if _ready(table, present, place, waiting[k] & table.key_mask):
                best = lane
        code = waiting[head[best]]
        head[best] += 1
        g = table.classes[code >> table.shift].group
        q = table.first[g] + length[g]
        place[code & table.key_mask] = q
        ops[q] = code
        length[g] += 1
    return ops, length, place


@njit(cache=True)
def _ready(table: Table, present: Flags, place: Codes, x: int) -> bool:
    """True if everything on other streams that must come before `x` is placed."""
    c, i = x >> table.shift, x & ((1 << table.shift) - 1)
    before = table.classes[c].before
    if before >= 0 and place[before << table.shift | i] < 0:
        return False
    if first_needed(table.links, c, i, table.shift, place, 0) < 0:
        return False
    reload = table.classes[c].returns
    return bool(reload < 0 or not present[reload << table.shift | i] or place[reload << table.shift | i] >= 0)


def orders_from_sequences(problem: Problem, table: Table, merged: Merged) -> Orders:
    """The orders, channel orders and waits that sequences stand for."""
    groups = zip(table.first.tolist(), merged.length.tolist(), strict=True)
    codes = np.concatenate([merged.ops[first : first + length] for first, length in groups])
    numbers = PassClasses.of(problem, len(KINDS) * table.stages)
    codes = codes[(codes & table.key_mask) >> table.shift < numbers.first_barrier]
    in_block = np.zeros(len(codes), bool)
    if merged.block_us is not None:
        kind, in_block = (codes & table.key_mask) >> table.shift, merged.block_us[codes & table.key_mask] >= 0
        codes = codes[~(in_block & (kind >= W * table.stages) & (kind < C * table.stages))]
        in_block = merged.block_us[codes & table.key_mask] >= 0
    of_class = codes >> table.shift
    own_class = (codes & table.key_mask) >> table.shift
    spread = own_class >= numbers.first
    kind, stage = np.divmod(np.where(spread, 0, own_class), table.stages)
    microbatch_order = _microbatch_order(problem, table, merged)
    unit = problem.units_in_order("F", microbatch_order)[codes & ((1 << table.shift) - 1)]
    option = (codes >> table.option_shift) % table.options
    inside, modes = np.zeros(len(codes), bool), None
    if problem.has_modes:
        modes = np.zeros((table.stages, table.units), np.int64)
        for s in range(table.stages):
            of_stage = stage == s
            options = options_of_stage(problem, s)
            inside |= of_stage & (kind == B) & np.array([entry.inside for entry in options])[option * of_stage]
            forwards = of_stage & (kind == F) & ~spread
            modes[s, unit[forwards]] = np.array([entry.choice for entry in options])[option[forwards]]
    of_orders = np.where(inside, BACKWARD_INSIDE, KIND_OF_ORDERS[kind])
    whole = (in_block & (kind == B)) | ~np.array([entry.split_backward for entry in problem.stages])[stage]
    of_orders = np.where(whole, WHOLE[of_orders], of_orders)
    number, device = np.divmod(own_class - numbers.first, table.devices)
    places = np.where(spread, device, stage)
    ops = OpArray(np.where(spread, len(ROWS) + number, of_orders), places, unit, problem.pass_names)
    lane = len(STREAMS) * table.classes["device"][of_class] + ops.stream
    lanes = len(STREAMS) * len(problem.devices)
    by_lane = np.argsort(lane, kind="stable")
    streams = [ops[places] for places in np.split(by_lane, np.cumsum(np.bincount(lane, minlength=lanes))[:-1])]
    devices = [DeviceOrders(*streams[k : k + len(STREAMS)]) for k in range(0, lanes, len(STREAMS))]
    channels = []
    for served in shared_channels(problem):
        on_channel = np.isin(lane, [len(STREAMS) * d + STREAMS.index(name) for d, name in served])
        channels.append(ops[np.flatnonzero(on_channel)])
    waits = _waits(table, ops, of_class, lane)
    firsts = np.flatnonzero(in_block & (kind == F) & ~spread)
    blocks = dict(zip(ops[firsts], ops[firsts + 1], strict=True))
    return Orders(devices, waits, [channel for channel in channels if channel], modes, microbatch_order, blocks)


def _microbatch_order(problem: Problem, table: Table, merged: Merged) -> list[int] | None:
    """The microbatches in the order in which they run; None where that is not free.

    Those of one class are alike and keep the order of their numbers, so the classes along the sequence say it.
    """
    if not table.free_order:
        return None
    first = merged.ops[merged.place[: table.units : table.slices]]  # F of their first slices on the first stage
    classes = (first >> table.option_shift) // table.options
    order = np.empty(problem.microbatches, np.int64)
    order[np.argsort(classes, kind="stable")] = np.argsort(problem.unit_class[:: table.slices], kind="stable")
    chosen: list[int] = order.tolist()
    return chosen


def _waits(table: Table, ops: OpArray, of_class: Ints, lane: Ints) -> dict[Op, list[Op]]:
    """Each op that takes memory waits for the last release before it on each other stream of its device.

    Where an earlier op of its stream already waits for that release, the wait is implied and left out.
    """
    waits: dict[Op, list[Op]] = {}
    acquires, releases = (table.classes[name][of_class] > 0 for name in ("acquires", "releases"))
    fused = np.isin(ops.kind, FUSED)  # what their W frees, too
    releases[fused] |= table.classes["releases"][of_class[fused] + table.stages] > 0
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
