"""Moves of the annealer, compiled: proposals, shifts, offloads, and repairs of memory.

A change is made in place; ``touched[0, g]`` and ``touched[1, g]`` are the first and last place of group g that it
touches, so that it can be kept or taken back. Every change leaves each group's sequence in an order that its own
dependencies allow; what another group makes impossible shows as a deadlock in the sweep.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from optpipe.ops import Floats, Ints
from solver.search.annealing.kernel import Latest, Times
from solver.search.annealing.sequence import NONE, B, Merged, O, R, Table, W, Word, below, fill, size, unit

UNTOUCHED = 1 << 40


@njit(cache=True)
def clear(touched: Ints) -> None:
    """Nothing is touched."""
    for g in range(touched.shape[1]):
        touched[0, g] = UNTOUCHED
        touched[1, g] = NONE


@njit(cache=True)
def copy_touched(table: Table, source: Merged, target: Merged, touched: Ints) -> None:
    """Make `target` equal to `source`, which differs from it in touched places only."""
    for g in range(len(table.first)):
        if touched[1, g] < 0:
            continue
        begin = table.first[g]
        for q in range(touched[0, g], min(touched[1, g] + 1, begin + target.length[g])):
            target.place[target.ops[q]] = NONE
        for q in range(touched[0, g], min(touched[1, g] + 1, begin + source.length[g])):
            target.ops[q] = source.ops[q]
            target.place[source.ops[q]] = q
        target.length[g] = source.length[g]


@njit(cache=True)
def neighbour(table: Table, merged: Merged, x: int, step: int) -> int:
    """The place of the op of the same class with the next lower (step -1) or higher (1) microbatch, or NONE."""
    mask = (1 << table.shift) - 1
    base, i = x & ~mask, (x & mask) + step
    while 0 <= i < table.microbatches:
        at = merged.place[base | i]
        if at >= 0:
            return int(at)
        i += step
    return NONE


@njit(cache=True)
def earliest(table: Table, merged: Merged, x: int) -> int:
    """The first place that `x` may take while all others stay: behind what it depends on within its group."""
    stages, mask = table.stages, (1 << table.shift) - 1
    c, i = x >> table.shift, x & mask
    g = table.classes[c].group
    at = max(table.first[g], neighbour(table, merged, x, -1) + 1)
    before = table.classes[c].before
    if before >= 0 and table.classes[before].group == g:
        at = max(at, merged.place[before << table.shift | i] + 1)
    if B * stages <= c < W * stages:
        at = max(at, merged.place[(c - stages) << table.shift | i] + 1)
        if table.classes[c].returns >= 0:
            at = max(at, merged.place[table.classes[c].returns << table.shift | i] + 1)
    elif W * stages <= c < O * stages:
        at = max(at, merged.place[(c - stages) << table.shift | i] + 1)
    return int(at)


@njit(cache=True)
def last(table: Table, merged: Merged, x: int) -> int:
    """The last place that `x` may take while all others stay."""
    stages, mask = table.stages, (1 << table.shift) - 1
    c, i = x >> table.shift, x & mask
    g = table.classes[c].group
    at = table.first[g] + merged.length[g] - 1
    following = neighbour(table, merged, x, 1)
    if following >= 0:
        at = min(at, following - 1)
    after = table.classes[c].after
    if after >= 0 and table.classes[after].group == g:
        at = min(at, merged.place[after << table.shift | i] - 1)
    if c < W * stages:
        at = min(at, merged.place[(c + stages) << table.shift | i] - 1)
        if table.classes[c].leaves >= 0 and merged.place[table.classes[c].leaves << table.shift | i] >= 0:
            at = min(at, merged.place[table.classes[c].leaves << table.shift | i] - 1)
    return int(at)


@njit(cache=True)
def shift(table: Table, merged: Merged, touched: Ints, x: int, target: int) -> None:
    """Move `x` to place `target`; what lies between makes room."""
    at = merged.place[x]
    step = 1 if target > at else -1
    g = table.classes[x >> table.shift].group
    for q in range(at, target, step):
        y = merged.ops[q + step]
        merged.ops[q] = y
        merged.place[y] = q
    merged.ops[target] = x
    merged.place[x] = target
    touched[0, g] = min(touched[0, g], at, target)
    touched[1, g] = max(touched[1, g], at, target)


@njit(cache=True)
def shift_by(table: Table, merged: Merged, touched: Ints, x: int, distance: int) -> bool:
    """Move `x` by up to `distance` places, as far as it may go. False where it may not move at all."""
    at = merged.place[x]
    if distance < 0:
        target = max(at + distance, earliest(table, merged, x))
        if target >= at:
            return False
    else:
        target = min(at + distance, last(table, merged, x))
        if target <= at:
            return False
    shift(table, merged, touched, x, target)
    return True


@njit(cache=True)
def insert(table: Table, merged: Merged, touched: Ints, x: int, target: int) -> None:
    """Add an op that is not there at place `target`."""
    g = table.classes[x >> table.shift].group
    end = table.first[g] + merged.length[g]
    merged.ops[end] = x
    merged.place[x] = end
    merged.length[g] += 1
    shift(table, merged, touched, x, target)


@njit(cache=True)
def remove(table: Table, merged: Merged, touched: Ints, x: int) -> None:
    """Take an op out."""
    g = table.classes[x >> table.shift].group
    end = table.first[g] + merged.length[g] - 1
    shift(table, merged, touched, x, end)
    merged.place[x] = NONE
    merged.length[g] -= 1


@njit(cache=True)
def add_offload(table: Table, merged: Merged, touched: Ints, s: int, i: int, after: int, ahead: int) -> bool:
    """Let the activation of F(s, i) leave `after` places behind F and return `ahead` places before B, if it stays now.

    Both places give way to the offloads of the microbatches before and after. False where there is no room.
    """
    leaves = (O * table.stages + s) << table.shift | i
    returns = (R * table.stages + s) << table.shift | i
    if merged.place[leaves] >= 0:
        return False
    forward = merged.place[s << table.shift | i]
    backward = merged.place[(B * table.stages + s) << table.shift | i]
    returned, left = neighbour(table, merged, returns, -1), neighbour(table, merged, leaves, -1)
    returning, leaving = neighbour(table, merged, returns, 1), neighbour(table, merged, leaves, 1)
    back = max(backward - ahead, returned + 1, forward + 1)
    if returning >= 0:
        back = min(back, returning)
    if back > backward or back <= max(returned, forward):
        return False
    out = max(min(forward + 1 + after, back), left + 1)
    if leaving >= 0:
        out = min(out, leaving)
    if out > back or out <= max(left, forward):
        return False
    insert(table, merged, touched, returns, back)
    insert(table, merged, touched, leaves, out)
    return True


@njit(cache=True)
def drop_offload(table: Table, merged: Merged, touched: Ints, s: int, i: int) -> bool:
    """Let the activation of F(s, i) stay, if it leaves now."""
    leaves = (O * table.stages + s) << table.shift | i
    if merged.place[leaves] < 0:
        return False
    remove(table, merged, touched, leaves)
    remove(table, merged, touched, (R * table.stages + s) << table.shift | i)
    return True


SHIFT, FILL, CHAIN, DIAGONAL, GRID, OFFLOAD, RELAY = range(7)
"""The kinds of moves; the last two need offloads."""
MOVES = 7


@njit(cache=True)
def propose(
    table: Table, merged: Merged, times: Times, latest: Latest, touched: Ints, weights: Floats, random: Word
) -> None:
    """Make a random change of a random kind, or none where there is no room."""
    total = 0.0
    for weight in weights:
        total += weight
    pick = unit(random) * total
    move = 0
    while move < MOVES - 1 and pick >= weights[move]:
        pick -= weights[move]
        move += 1
    if move >= OFFLOAD and len(table.offloadable) == 0:
        return  # by rounding alone, its weight being 0
    if move == OFFLOAD:
        _toggle_offload(table, merged, touched, random)
        return
    if move == RELAY:
        _relay(table, merged, touched, random)
        return
    x = _chosen(table, merged, times, latest, random)
    if move == FILL:
        _fill(table, merged, touched, random, x)
        return
    distance = 1 + below(random, 1 << below(random, 7))
    distance = -distance if below(random, 2) else distance
    if move == SHIFT:
        shift_by(table, merged, touched, x, distance)
    elif move == CHAIN:
        _chain(table, merged, touched, random, x, distance)
    elif move == DIAGONAL:
        _diagonal(table, merged, touched, random, x, distance)
    else:
        _grid(table, merged, touched, random, x, distance)


@njit(cache=True)
def _chosen(table: Table, merged: Merged, times: Times, latest: Latest, random: Word) -> int:
    """A random op, preferably one without slack."""
    total = size(merged)
    x = times.order[below(random, total)]
    if below(random, 3) == 0:
        return int(x)
    for _ in range(8):
        start = times.end_us[x] - table.classes[x >> table.shift].duration_us
        if latest.start_us[x] - start <= 1e-9 * start:
            break
        x = times.order[below(random, total)]
    return int(x)


@njit(cache=True)
def _fill(table: Table, merged: Merged, touched: Ints, random: Word, x: int) -> None:
    """Bring some later op in front of `x`."""
    g = table.classes[x >> table.shift].group
    at = int(merged.place[x])
    room = table.first[g] + merged.length[g] - 1 - at
    if room <= 0:
        return
    reach = min(room, 1 << (1 + below(random, 7)))
    for _ in range(4):
        y = int(merged.ops[at + 1 + below(random, reach)])
        if earliest(table, merged, y) <= at:
            shift(table, merged, touched, y, at)
            return


@njit(cache=True)
def _chain(table: Table, merged: Merged, touched: Ints, random: Word, x: int, distance: int) -> None:
    """Shift an op and those of the next microbatches alike."""
    i = x & ((1 << table.shift) - 1)
    count = min(2 + below(random, 1 << (1 + below(random, 6))), table.microbatches - i)
    for k in range(count):
        y = x + (k if distance < 0 else count - 1 - k)
        if merged.place[y] >= 0:
            shift_by(table, merged, touched, y, distance)


@njit(cache=True)
def _diagonal(table: Table, merged: Merged, touched: Ints, random: Word, x: int, distance: int) -> None:
    """Shift an op and those of the next stages of its microbatch alike."""
    for k in range(_stages_from(table, random, x)):
        y = x + (k << table.shift)
        if merged.place[y] >= 0:
            shift_by(table, merged, touched, y, distance)


@njit(cache=True)
def _grid(table: Table, merged: Merged, touched: Ints, random: Word, x: int, distance: int) -> None:
    """Shift an op, those of the next stages and of the next microbatches alike."""
    for k in range(_stages_from(table, random, x)):
        _chain(table, merged, touched, random, x + (k << table.shift), distance)


@njit(cache=True)
def _stages_from(table: Table, random: Word, x: int) -> int:
    """A random number of stages from that of an op on, as many as there are at most."""
    s = (x >> table.shift) % table.stages
    return int(min(2 + below(random, 8), table.stages - s))


@njit(cache=True)
def _relay(table: Table, merged: Merged, touched: Ints, random: Word) -> None:
    """Let another activation of a device leave in the place of one that leaves now."""
    s = int(table.offloadable[below(random, len(table.offloadable))])
    i = below(random, table.microbatches)
    if not drop_offload(table, merged, touched, s, i):
        return
    for _ in range(8):
        other = int(table.offloadable[below(random, len(table.offloadable))])
        j = max(0, min(table.microbatches - 1, i - 3 + below(random, 7)))
        if table.classes[other].device == table.classes[s].device and (other != s or j != i):
            after, ahead = below(random, 8), below(random, 1 << (1 + below(random, 5)))
            if add_offload(table, merged, touched, other, j, after, ahead):
                return


@njit(cache=True)
def _toggle_offload(table: Table, merged: Merged, touched: Ints, random: Word) -> None:
    """Add or drop the offload of some activation."""
    s = int(table.offloadable[below(random, len(table.offloadable))])
    i = below(random, table.microbatches)
    if merged.place[(O * table.stages + s) << table.shift | i] >= 0:
        drop_offload(table, merged, touched, s, i)
    else:
        after, ahead = below(random, 8), below(random, 1 << (1 + below(random, 5)))
        add_offload(table, merged, touched, s, i, after, ahead)


REACH = 200
"""How far a repair looks for a release, in places."""


@njit(cache=True)
def _begin(table: Table, levels: Ints, touched: Ints, g: int, level: Ints) -> int:
    """Where counting must begin, and the level of each device of the group there.

    Where a group has one device, its level before each place is known. `level` comes in as zeros.
    """
    d = table.alone[g]
    if d < 0 or touched[0, g] == table.first[g]:
        return int(table.first[g])
    level[d] = levels[touched[0, g]]
    return int(touched[0, g])


@njit(cache=True)
def note_levels(table: Table, merged: Merged, levels: Ints, touched: Ints) -> None:
    """Set the level of each op's device before each touched place."""
    level = np.zeros(table.devices, np.int64)
    for g in range(len(table.first)):
        if touched[1, g] < 0:
            continue
        fill(level, 0)
        for q in range(_begin(table, levels, touched, g, level), table.first[g] + merged.length[g]):
            one = table.classes[merged.ops[q] >> table.shift]
            levels[q] = level[one.device]
            level[one.device] += one.change_bytes
            if q > touched[1, g]:
                break


@njit(cache=True)
def keeps_budgets(table: Table, merged: Merged, levels: Ints, touched: Ints, g: int, repairs: int, pull: bool) -> bool:
    """True if the sequence of a group keeps the budgets of its devices, after up to `repairs` further shifts.

    `levels` are those before the change. A repair brings a release forward to the op that has no room (`pull`), or
    puts that op off behind the release.
    """
    level = np.zeros(table.devices, np.int64)
    q = _begin(table, levels, touched, g, level)
    while q < table.first[g] + merged.length[g] and q <= touched[1, g]:
        one = table.classes[merged.ops[q] >> table.shift]
        if one.need_bytes > 0 and level[one.device] + one.need_bytes > table.budget_bytes[one.device]:
            if repairs == 0 or not _repair(table, merged, touched, q, pull):
                return False
            repairs -= 1
            continue
        level[one.device] += one.change_bytes
        q += 1
    return True


@njit(cache=True)
def _repair(table: Table, merged: Merged, touched: Ints, q: int, pull: bool) -> bool:
    x = merged.ops[q]
    short = table.classes[x >> table.shift]
    for at in range(q + 1, min(q + REACH, table.first[short.group] + merged.length[short.group])):
        y = merged.ops[at]
        one = table.classes[y >> table.shift]
        if one.device != short.device or one.change_bytes >= 0:
            continue
        if not pull:
            if last(table, merged, x) < at:
                return False
            shift(table, merged, touched, x, at)
            return True
        if earliest(table, merged, y) <= q:
            shift(table, merged, touched, y, q)
            return True
    return False
