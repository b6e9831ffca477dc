"""Edits of sequences in place, compiled: where an op may stand, shifts, offloads, options, and repairs of memory.

``touched[0, g]`` and ``touched[1, g]`` are the first and last place of group g that was touched, so that a move of
several edits can be accepted or reverted. Every edit leaves each group's sequence in an order that its own dependencies
allow; what another group makes impossible shows as a deadlock in the sweep.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from optpipe.ops import Floats, Ints
from solver.search.annealing.links import first_needing, has_links, last_needed
from solver.search.annealing.sequence import (
    Merged,
    Word,
    below,
    block_at,
    fill,
    note_blocks,
    set_time_in_block,
    time_in_block,
)
from solver.search.annealing.table import NONE, B, C, O, R, Table, W, turned

UNTOUCHED = 1 << 40


@njit(cache=True)
def clear(touched: Ints) -> None:
    """Mark every place as untouched."""
    for g in range(touched.shape[1]):
        touched[0, g] = UNTOUCHED
        touched[1, g] = NONE


@njit(cache=True)
def widen(table: Table, merged: Merged, touched: Ints, g: int) -> None:
    """Mark the places from which on, and up to which, blocks may be others than before, and note these."""
    if table.has_blocks:
        end = table.first[g] + merged.length[g]
        touched[0, g] = max(table.first[g], touched[0, g] - 2)
        touched[1, g] = max(touched[1, g], min(end - 1, touched[1, g] + 2))
        note_blocks(table, merged, touched[0, g], min(end, touched[1, g] + 1))


@njit(cache=True)
def saved_us(table: Table, merged: Merged, touched: Ints) -> float:
    """Compute by how much less time the ops at touched places take in their blocks."""
    total = 0.0
    for g in range(len(table.first)):
        for q in range(touched[0, g], min(touched[1, g] + 1, table.first[g] + merged.length[g])):
            time_us = time_in_block(merged.block_us, merged.ops[q] & table.key_mask)
            if time_us >= 0:
                total += table.classes[merged.ops[q] >> table.shift].duration_us - time_us
    return total


@njit(cache=True)
def copy_touched(table: Table, source: Merged, target: Merged, touched: Ints) -> None:
    """Make `target` equal to `source`, which differs from it in touched places only."""
    for g in range(len(table.first)):
        if touched[1, g] < 0:
            continue
        begin = table.first[g]
        for q in range(touched[0, g], min(touched[1, g] + 1, begin + target.length[g])):
            target.place[target.ops[q] & table.key_mask] = NONE
        for q in range(touched[0, g], min(touched[1, g] + 1, begin + source.length[g])):
            target.ops[q] = source.ops[q]
            target.place[source.ops[q] & table.key_mask] = q
            if table.has_blocks:
                x = source.ops[q] & table.key_mask
                set_time_in_block(target.block_us, x, time_in_block(source.block_us, x))
        target.length[g] = source.length[g]


@njit(cache=True)
def runs_forward(stages: int, c: int) -> bool:
    """True if the ops of a class run slices ascending: F and O."""
    return c < stages or O * stages <= c < R * stages


@njit(cache=True)
def neighbour(table: Table, merged: Merged, x: int, step: int) -> int:
    """The place of the op of the same class before (step -1) or after (1) an op, or NONE."""
    mask = (1 << table.shift) - 1
    base, slices, forwards = x & ~mask, table.slices, runs_forward(table.stages, x >> table.shift)
    n = turned(slices, forwards, x & mask) + step
    while 0 <= n < table.units:
        at = merged.place[base | turned(slices, forwards, n)]
        if at >= 0:
            return int(at)
        n += step
    return NONE


@njit(cache=True)
def earliest(table: Table, merged: Merged, x: int) -> int:
    """The first place that `x` may take while all others stay: behind what it depends on within its group."""
    stages, mask = table.stages, (1 << table.shift) - 1
    c, i = x >> table.shift, x & mask
    g = table.classes[c].group
    place = max(table.first[g], neighbour(table, merged, x, -1) + 1)  # units keep their order
    before = table.classes[c].before
    if before >= 0 and table.classes[before].group == g:
        place = max(place, merged.place[before << table.shift | i] + 1)
    if B * stages <= c < W * stages:  # B after its F and after its reload
        place = max(place, merged.place[(c - stages) << table.shift | i] + 1)
        if table.classes[c].returns >= 0:
            place = max(place, merged.place[table.classes[c].returns << table.shift | i] + 1)
        place = max(place, merged.place[(c + (C - B) * stages) << table.shift | i] + 1)
    elif W * stages <= c < C * stages:  # W after its B
        place = max(place, merged.place[(c - stages) << table.shift | i] + 1)
    elif C * stages <= c < O * stages:  # C after its F and after its reload
        place = max(place, merged.place[(c - C * stages) << table.shift | i] + 1)
        if table.classes[c].returns >= 0:
            place = max(place, merged.place[table.classes[c].returns << table.shift | i] + 1)
    if has_links(table.links):
        place = 1 + last_needed(table.links, c, i, table.shift, merged.place, g, place - 1)
    return int(place)


@njit(cache=True)
def last(table: Table, merged: Merged, x: int) -> int:
    """The last place that `x` may take while all others stay: in front of what depends on it within its group."""
    stages, mask = table.stages, (1 << table.shift) - 1
    c, i = x >> table.shift, x & mask
    g = table.classes[c].group
    place = table.first[g] + merged.length[g] - 1
    following = neighbour(table, merged, x, 1)
    if following >= 0:
        place = min(place, following - 1)
    after = table.classes[c].after
    if after >= 0 and table.classes[after].group == g:
        place = min(place, merged.place[after << table.shift | i] - 1)
    if c < W * stages and merged.place[(c + stages) << table.shift | i] >= 0:
        # F before its B, B before its W if it has one
        place = min(place, merged.place[(c + stages) << table.shift | i] - 1)
    elif C * stages <= c < O * stages:  # C before its B
        place = min(place, merged.place[(c - (C - B) * stages) << table.shift | i] - 1)
    if c < stages and merged.place[(C * stages + c) << table.shift | i] >= 0:  # F before its C
        place = min(place, merged.place[(C * stages + c) << table.shift | i] - 1)
    if table.classes[c].leaves >= 0 and merged.place[table.classes[c].leaves << table.shift | i] >= 0:
        # F before its offload, R before its C
        place = min(place, merged.place[table.classes[c].leaves << table.shift | i] - 1)
    if has_links(table.links):
        place = first_needing(table.links, c, i, table.shift, merged.place, g, place + 1) - 1
    return int(place)


@njit(cache=True)
def shift(table: Table, merged: Merged, touched: Ints, x: int, target: int) -> None:
    """Move `x` to place `target`; the ops between move up by one place."""
    at = merged.place[x]
    code = merged.ops[at]
    step = 1 if target > at else -1
    g = table.classes[x >> table.shift].group
    for q in range(at, target, step):
        y = merged.ops[q + step]
        merged.ops[q] = y
        merged.place[y & table.key_mask] = q
    merged.ops[target] = code
    merged.place[x] = target
    touched[0, g] = min(touched[0, g], at, target)
    touched[1, g] = max(touched[1, g], at, target)


@njit(cache=True)
def shift_by(table: Table, merged: Merged, touched: Ints, x: int, distance: int) -> bool:
    """Move `x` by up to `distance` places, as far as it may go. False where it may not move at all."""
    at = merged.place[x]
    if table.has_blocks and block_at(table, merged, at, table.block_us) >= 0:
        return _shift_block(table, merged, touched, x, distance, merged.block_us)
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
def _shift_block(
    table: Table, merged: Merged, touched: Ints, forward: int, distance: int, block_us: Floats | None
) -> bool:
    """Move a block by up to `distance` places, as far as all of its ops may go."""
    if block_us is None:
        return False
    at = merged.place[forward]
    backward = int(merged.ops[at + 1] & table.key_mask)
    weight = backward + (table.stages << table.shift)
    split = merged.place[weight] >= 0
    if distance < 0:
        target = max(at + distance, earliest(table, merged, forward), earliest(table, merged, backward))
        if split:
            target = max(target, neighbour(table, merged, weight, -1) + 1)
        if target >= at:
            return False
        shift(table, merged, touched, forward, target)
        shift(table, merged, touched, backward, target + 1)
        if split:
            shift(table, merged, touched, weight, target + 2)
        return True
    end = at + 1 + split
    step = min(distance, last(table, merged, int(merged.ops[end] & table.key_mask)) - end)
    step = min(step, last(table, merged, forward) - end)
    following = neighbour(table, merged, backward, 1)
    if following >= 0:
        step = min(step, following - 1 - end)
    after = table.classes[backward >> table.shift].after
    if after >= 0 and table.classes[after].group == table.classes[forward >> table.shift].group:
        step = min(step, merged.place[after << table.shift | backward & ((1 << table.shift) - 1)] - 1 - end)
    if step <= 0:
        return False
    if split:
        shift(table, merged, touched, weight, end + step)
    shift(table, merged, touched, backward, at + 1 + step)
    shift(table, merged, touched, forward, at + step)
    return True


@njit(cache=True)
def insert(table: Table, merged: Merged, touched: Ints, x: int, number: int, target: int) -> None:
    """Add an absent op at place `target`, with the number that says what it costs."""
    g = table.classes[x >> table.shift].group
    end = table.first[g] + merged.length[g]
    merged.ops[end] = number << table.option_shift | x
    merged.place[x] = end
    merged.length[g] += 1
    shift(table, merged, touched, x, target)


@njit(cache=True)
def remove(table: Table, merged: Merged, touched: Ints, x: int) -> None:
    """Remove an op."""
    g = table.classes[x >> table.shift].group
    end = table.first[g] + merged.length[g] - 1
    shift(table, merged, touched, x, end)
    merged.place[x] = NONE
    merged.length[g] -= 1


@njit(cache=True)
def add_offload(table: Table, merged: Merged, touched: Ints, s: int, i: int, after: int, ahead: int) -> bool:
    """Offload the activation of F(s, i): O `after` places behind F, R `ahead` places before B, if it stays now.

    Both are moved to keep the order of units among the stage's offloads and reloads. False where no place does.
    """
    leaves = (O * table.stages + s) << table.shift | i
    returns = (R * table.stages + s) << table.shift | i
    if merged.place[leaves] >= 0:
        return False
    forward = merged.place[s << table.shift | i]
    backward = merged.place[(B * table.stages + s) << table.shift | i]
    last_reload, last_offload = neighbour(table, merged, returns, -1), neighbour(table, merged, leaves, -1)
    next_reload, next_offload = neighbour(table, merged, returns, 1), neighbour(table, merged, leaves, 1)
    back = max(backward - ahead, last_reload + 1, forward + 1)
    if next_reload >= 0:
        back = min(back, next_reload)
    if back > backward or back <= max(last_reload, forward):
        return False
    out = max(min(forward + 1 + after, back), last_offload + 1)
    if next_offload >= 0:
        out = min(out, next_offload)
    if out > back or out <= max(last_offload, forward):
        return False
    number = int(merged.ops[forward] >> table.option_shift)
    insert(table, merged, touched, returns, number, back)  # first, since it stands behind: `out` stays the place of O
    insert(table, merged, touched, leaves, number, out)
    return True


@njit(cache=True)
def drop_offload(table: Table, merged: Merged, touched: Ints, s: int, i: int) -> bool:
    """Keep the activation of F(s, i) on its device, if it is offloaded now."""
    leaves = (O * table.stages + s) << table.shift | i
    if merged.place[leaves] < 0:
        return False
    remove(table, merged, touched, leaves)
    remove(table, merged, touched, (R * table.stages + s) << table.shift | i)
    return True


@njit(cache=True)
def option_of(table: Table, merged: Merged, s: int, i: int) -> int:
    """The option in which the activation of F(s, i) is held."""
    return int(merged.ops[merged.place[s << table.shift | i]] >> table.option_shift) % table.options


@njit(cache=True)
def renumber(table: Table, merged: Merged, touched: Ints, x: int, number: int) -> None:
    """Let an op cost what it does in another option, or of another unit class."""
    q = int(merged.place[x])
    g = table.classes[x >> table.shift].group
    merged.ops[q] = number << table.option_shift | x
    touched[0, g] = min(touched[0, g], q)
    touched[1, g] = max(touched[1, g], q)


@njit(cache=True)
def set_option(table: Table, merged: Merged, touched: Ints, random: Word, s: int, i: int, option: int) -> bool:
    """Hold the activation of F(s, i) in another option: its copies and C at random distances from F and B.

    False where one of these finds no place; then the sequence is not possible, and the move must be reverted.
    """
    for kind in (C, O, R):
        x = (kind * table.stages + s) << table.shift | i
        if merged.place[x] >= 0:
            remove(table, merged, touched, x)
    number = int(merged.ops[merged.place[s << table.shift | i]] >> table.option_shift)
    number += option - number % table.options
    for kind in (0, B):
        renumber(table, merged, touched, (kind * table.stages + s) << table.shift | i, number)
    record = table.classes[number << (table.option_shift - table.shift) | s]
    if record.copies:
        after, ahead = below(random, 8), below(random, 1 << (1 + below(random, 5)))
        if not add_offload(table, merged, touched, s, i, after, ahead):
            return False
    if record.again:
        again = (C * table.stages + s) << table.shift | i
        following = neighbour(table, merged, again, 1)
        lowest = earliest(table, merged, again)
        highest = int(merged.place[(B * table.stages + s) << table.shift | i])
        if following >= 0:
            highest = min(highest, following)
        if lowest > highest:
            return False
        distance = below(random, 1 << below(random, 6))
        insert(table, merged, touched, again, number, max(lowest, highest - distance))
    return True


REACH = 200
"""Places up to which a repair searches for a release."""


@njit(cache=True)
def _first_counted(table: Table, levels: Ints, touched: Ints, g: int, level: Ints) -> int:
    """The place from which on levels must be counted; sets `level`, zeros before, to those of the devices there.

    A group of one device starts at its first touched place, before which `levels` holds. In a group of several,
    `levels` has only the level of each op's own device, so counting starts at the group's first place.
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
        for q in range(_first_counted(table, levels, touched, g, level), table.first[g] + merged.length[g]):
            record = table.classes[merged.ops[q] >> table.shift]
            levels[q] = level[record.device]
            level[record.device] += record.change_bytes
            if q > touched[1, g]:
                break


@njit(cache=True)
def keeps_budgets(table: Table, merged: Merged, levels: Ints, touched: Ints, g: int, repairs: int, pull: int) -> bool:
    """True if the sequence of a group keeps the budgets of its devices, after up to `repairs` further shifts.

    `levels` are those before the move. A repair brings a release forward to the op that has no room (`pull`), or
    puts that op off behind the release. Only touched places are counted: a move permutes what stands between the first
    and the last of them, so behind them every level is as before. Repairs extend what is touched.
    """
    level = np.zeros(table.devices, np.int64)
    q = _first_counted(table, levels, touched, g, level)
    while q < table.first[g] + merged.length[g] and q <= touched[1, g]:
        record = table.classes[merged.ops[q] >> table.shift]
        need_bytes = record.need_bytes
        if time_in_block(merged.block_us, merged.ops[q] & table.key_mask) >= 0:
            need_bytes = 0  # its forward takes it
            if (merged.ops[q] & table.key_mask) >> table.shift < B * table.stages:
                need_bytes = record.block_bytes + table.classes[merged.ops[q + 1] >> table.shift].block_bytes
        if need_bytes > 0 and level[record.device] + need_bytes > table.budget_bytes[record.device]:
            if repairs == 0 or not _repair(table, merged, touched, q, pull):
                return False
            repairs -= 1
            continue
        level[record.device] += record.change_bytes
        q += 1
    return True


@njit(cache=True)
def _repair(table: Table, merged: Merged, touched: Ints, q: int, pull: int) -> bool:
    """Exchange the op at place `q`, which has no room, and the next release of its device that can be exchanged."""
    code = merged.ops[q]
    x, short = int(code & table.key_mask), table.classes[code >> table.shift]
    for place in range(q + 1, min(q + REACH, table.first[short.group] + merged.length[short.group])):
        code = merged.ops[place]
        y, record = int(code & table.key_mask), table.classes[code >> table.shift]
        if record.device != short.device or record.change_bytes >= 0:
            continue
        if not pull:
            if last(table, merged, x) < place:
                return False
            shift(table, merged, touched, x, place)
            return True
        if earliest(table, merged, y) <= q:
            shift(table, merged, touched, y, q)
            return True
    return False
