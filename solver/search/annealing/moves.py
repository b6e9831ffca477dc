"""Moves of the annealer, compiled: proposals, shifts, offloads, and repairs of memory.

A move is made in place; ``touched[0, g]`` and ``touched[1, g]`` are the first and last place of group g that it
touches, so that it can be accepted or reverted. Every move leaves each group's sequence in an order that its own
dependencies allow; what another group makes impossible shows as a deadlock in the sweep.

Ops are shifted within a sequence (the insertion neighbourhood of job shops: van Laarhoven, Aarts and Lenstra 1992;
Dell'Amico and Trubian 1993), mostly ops without slack, since only these can make the schedule shorter. Chains and
diagonals shift many ops alike: good pipeline schedules repeat by microbatch and by stage, and between two of them lie
worse ones that no single shift gets past.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from optpipe.ops import Floats, Ints
from solver.search.annealing.kernel import Latest, Times
from solver.search.annealing.sequence import (
    KINDS,
    NONE,
    B,
    C,
    Merged,
    O,
    R,
    Table,
    W,
    Word,
    below,
    block_at,
    fill,
    note_blocks,
    set_time_in_block,
    size,
    time_in_block,
    time_of_pair,
    turned,
    unit,
)

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
def _runs_forward(stages: int, c: int) -> bool:
    """True if the ops of a class run slices ascending: F and O."""
    return c < stages or O * stages <= c < R * stages


@njit(cache=True)
def neighbour(table: Table, merged: Merged, x: int, step: int) -> int:
    """The place of the op of the same class before (step -1) or after (1) an op, or NONE."""
    mask = (1 << table.shift) - 1
    base, slices, forwards = x & ~mask, table.slices, _runs_forward(table.stages, x >> table.shift)
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
    if table.has_blocks and block_at(table, merged, at) >= 0:
        return _shift_block(table, merged, touched, x, distance)
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
def _shift_block(table: Table, merged: Merged, touched: Ints, forward: int, distance: int) -> bool:
    """Move a block by up to `distance` places, as far as all of its ops may go."""
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
    merged.ops[end] = number << table.way_shift | x
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
    number = int(merged.ops[forward] >> table.way_shift)
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
def way_of(table: Table, merged: Merged, s: int, i: int) -> int:
    """The way in which the activation of F(s, i) is held."""
    return int(merged.ops[merged.place[s << table.shift | i]] >> table.way_shift) % table.ways


@njit(cache=True)
def renumber(table: Table, merged: Merged, touched: Ints, x: int, number: int) -> None:
    """Let an op cost what it does in another way, or of another unit class."""
    q = int(merged.place[x])
    g = table.classes[x >> table.shift].group
    merged.ops[q] = number << table.way_shift | x
    touched[0, g] = min(touched[0, g], q)
    touched[1, g] = max(touched[1, g], q)


@njit(cache=True)
def set_way(table: Table, merged: Merged, touched: Ints, random: Word, s: int, i: int, way: int) -> bool:
    """Hold the activation of F(s, i) in another way: its copies and C at random distances from F and B.

    False where one of these finds no place; then the sequence is not possible, and the move must be reverted.
    """
    for kind in (C, O, R):
        x = (kind * table.stages + s) << table.shift | i
        if merged.place[x] >= 0:
            remove(table, merged, touched, x)
    number = int(merged.ops[merged.place[s << table.shift | i]] >> table.way_shift)
    number += way - number % table.ways
    for kind in (0, B):
        renumber(table, merged, touched, (kind * table.stages + s) << table.shift | i, number)
    record = table.classes[number << (table.way_shift - table.shift) | s]
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


SHIFT, FILL, CHAIN, DIAGONAL, GRID, OFFLOAD, RELAY, WAY, EXCHANGE, REORDER, JOIN = range(11)
"""The kinds of moves; OFFLOAD and RELAY need offloads, WAY and EXCHANGE modes, REORDER a free order of microbatches,
JOIN blocks."""
MOVES = 11


@njit(cache=True)
def propose(
    table: Table, merged: Merged, times: Times, latest: Latest, touched: Ints, weights: Floats, random: Word
) -> bool:
    """Make a random move of a random kind, or none where there is no room for it.

    False where what is left of the sequence is not possible: the move must be reverted.
    """
    total = 0.0
    for weight in weights:
        total += weight
    pick = unit(random) * total
    move = 0
    while move < MOVES - 1 and pick >= weights[move]:
        pick -= weights[move]
        move += 1
    if move == REORDER and table.free_order:
        _reorder(table, merged, touched, random)
        return True
    if move == JOIN and table.has_blocks:
        _join_or_part(table, merged, touched, random, _random_op(table, merged, times, latest, random))
        return True
    if move in (JOIN, REORDER) or (move >= OFFLOAD and len(table.choosing) == 0):
        return True  # by rounding alone, its weight being 0
    if move == WAY:
        return _change_ways(table, merged, touched, random)
    if move == EXCHANGE:
        return _exchange_ways(table, merged, touched, random)
    if move == OFFLOAD:
        _toggle_offload(table, merged, touched, random)
        return True
    if move == RELAY:
        _relay(table, merged, touched, random)
        return True
    x = _random_op(table, merged, times, latest, random)
    if move == FILL:
        _fill(table, merged, touched, random, x)
        return True
    # Up to a random power of two, so that all scales occur and short shifts, which are accepted most, most often.
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
    return True


@njit(cache=True)
def _random_op(table: Table, merged: Merged, times: Times, latest: Latest, random: Word) -> int:
    """A random op, in two of three cases one without slack if a few tries meet one.

    Only ops without slack lie on a critical path; the others are needed too, to make room for them.
    """
    total = size(merged)
    code = times.order[below(random, total)]
    if below(random, 3) == 0:
        return int(code & table.key_mask)
    for _ in range(8):
        x = code & table.key_mask
        start = times.end_us[x] - table.classes[code >> table.shift].duration_us
        if time_in_block(merged.block_us, x) >= 0:
            if x >> table.shift >= B * table.stages:
                code = times.order[below(random, total)]  # it begins with its forward
                continue
            start = times.end_us[x] - time_in_block(merged.block_us, x)
        if latest.start_us[x] - start <= 1e-9 * start:
            break
        code = times.order[below(random, total)]
    return int(code & table.key_mask)


@njit(cache=True)
def _fill(table: Table, merged: Merged, touched: Ints, random: Word, x: int) -> None:
    """Bring some later op in front of `x`: where `x` waits, the device is idle until it starts."""
    g = table.classes[x >> table.shift].group
    place = int(merged.place[x])
    room = table.first[g] + merged.length[g] - 1 - place
    if room <= 0:
        return
    reach = min(room, 1 << (1 + below(random, 7)))
    for _ in range(4):
        y = int(merged.ops[place + 1 + below(random, reach)] & table.key_mask)
        if earliest(table, merged, y) <= place:
            shift(table, merged, touched, y, place)
            return


@njit(cache=True)
def _join_or_part(table: Table, merged: Merged, touched: Ints, random: Word, x: int) -> None:
    """Join a forward near an op and a near backward, now and then those of the next units too; or part a block."""
    mask, g = (1 << table.shift) - 1, table.classes[x >> table.shift].group
    begin, end = table.first[g], table.first[g] + merged.length[g]
    at = _near(random, merged.place[x], begin, end)
    for _ in range(4):
        if merged.ops[at] & table.key_mask < table.stages << table.shift:
            break
        at = _near(random, merged.place[x], begin, end)
    forward = int(merged.ops[at] & table.key_mask)
    if forward >= table.stages << table.shift:
        return
    number = int(merged.ops[at] >> table.way_shift)
    if time_in_block(merged.block_us, forward) >= 0 and below(random, 2):
        renumber(table, merged, touched, forward, number - 1)
        return
    for _ in range(8):
        backward = int(merged.ops[_near(random, at, begin, end)] & table.key_mask)
        b = (backward >> table.shift) - B * table.stages
        if 0 <= b < table.stages and time_of_pair(table.block_us, forward >> table.shift, b) >= 0:
            break
    else:
        return
    pull, count = below(random, 2), 1 if below(random, 3) else 1 + below(random, 1 << (1 + below(random, 6)))
    for k in range(min(count, table.units - max(forward & mask, backward & mask))):
        if forward & mask != backward & mask:
            _join(table, merged, touched, forward + k, backward + k, pull)


@njit(cache=True)
def _near(random: Word, at: int, begin: int, end: int) -> int:
    """A random place, most often a near one, of those from `begin` up to `end`."""
    distance = below(random, 1 << (1 + below(random, 6)))
    return int(max(begin, at - distance) if below(random, 2) else min(end - 1, at + distance))


@njit(cache=True)
def _join(table: Table, merged: Merged, touched: Ints, forward: int, backward: int, pull: int) -> None:
    """Bring a forward and a backward together, the one that is later first (`pull`) or last, and the W behind both.

    They may come no nearer than what they depend on lets them.
    """
    weight = backward + (table.stages << table.shift)
    if merged.place[backward] > merged.place[forward]:
        for k in range(2):
            if k == pull:
                target = min(last(table, merged, forward), merged.place[backward] - 1)
                shift(table, merged, touched, forward, max(target, merged.place[forward]))
            else:
                target = max(earliest(table, merged, backward), merged.place[forward] + 1)
                shift(table, merged, touched, backward, min(target, merged.place[backward]))
    else:
        for k in range(2):
            if k == pull:
                if merged.place[weight] >= 0 and merged.place[weight] < merged.place[forward]:
                    target = min(last(table, merged, weight), merged.place[forward])
                    shift(table, merged, touched, weight, max(target, merged.place[weight]))
                target = min(last(table, merged, backward), merged.place[forward])
                shift(table, merged, touched, backward, max(target, merged.place[backward]))
            else:
                target = max(earliest(table, merged, forward), merged.place[backward])
                shift(table, merged, touched, forward, min(target, merged.place[forward]))
            if merged.place[backward] > merged.place[forward]:
                break
    if merged.place[weight] >= 0:
        target = max(earliest(table, merged, weight), merged.place[backward] + 1)
        shift(table, merged, touched, weight, min(target, merged.place[weight]))
    number = int(merged.ops[merged.place[forward]] >> table.way_shift)
    renumber(table, merged, touched, forward, number + 1 - number % table.ways)


@njit(cache=True)
def _chain(table: Table, merged: Merged, touched: Ints, random: Word, x: int, distance: int) -> None:
    """Shift an op and those of the next units alike, in the order in which none is in the way of the next."""
    mask, slices, forwards = (1 << table.shift) - 1, table.slices, _runs_forward(table.stages, x >> table.shift)
    n = turned(slices, forwards, x & mask)
    count = min(2 + below(random, 1 << (1 + below(random, 6))), table.units - n)
    for k in range(count):
        y = x & ~mask | turned(slices, forwards, n + (k if distance < 0 else count - 1 - k))
        if merged.place[y] >= 0:
            shift_by(table, merged, touched, y, distance)


@njit(cache=True)
def _diagonal(table: Table, merged: Merged, touched: Ints, random: Word, x: int, distance: int) -> None:
    """Shift an op and those of the next stages of its unit alike."""
    for k in range(_stages_from(table, random, x)):
        y = x + (k << table.shift)
        if merged.place[y] >= 0:
            shift_by(table, merged, touched, y, distance)


@njit(cache=True)
def _grid(table: Table, merged: Merged, touched: Ints, random: Word, x: int, distance: int) -> None:
    """Shift an op, those of the next stages and of the next units alike."""
    for k in range(_stages_from(table, random, x)):
        _chain(table, merged, touched, random, x + (k << table.shift), distance)


@njit(cache=True)
def _stages_from(table: Table, random: Word, x: int) -> int:
    """A random number of stages from that of an op on, no more than there are."""
    s = (x >> table.shift) % table.stages
    return int(min(2 + below(random, 8), table.stages - s))


@njit(cache=True)
def _relay(table: Table, merged: Merged, touched: Ints, random: Word) -> None:
    """Offload another activation of a device in the place of one that is offloaded now: the traffic stays the same."""
    s = int(table.choosing[below(random, len(table.choosing))])
    i = below(random, table.units)
    if not drop_offload(table, merged, touched, s, i):
        return
    for _ in range(8):
        other = int(table.choosing[below(random, len(table.choosing))])
        j = max(0, min(table.units - 1, i - 3 + below(random, 7)))
        if table.classes[other].device == table.classes[s].device and (other != s or j != i):
            after, ahead = below(random, 8), below(random, 1 << (1 + below(random, 5)))
            if add_offload(table, merged, touched, other, j, after, ahead):
                return


@njit(cache=True)
def _toggle_offload(table: Table, merged: Merged, touched: Ints, random: Word) -> None:
    """Add or drop the offload of some activation."""
    s = int(table.choosing[below(random, len(table.choosing))])
    i = below(random, table.units)
    if merged.place[(O * table.stages + s) << table.shift | i] >= 0:
        drop_offload(table, merged, touched, s, i)
    else:
        after, ahead = below(random, 8), below(random, 1 << (1 + below(random, 5)))
        add_offload(table, merged, touched, s, i, after, ahead)


@njit(cache=True)
def _change_ways(table: Table, merged: Merged, touched: Ints, random: Word) -> bool:
    """Hold some activation of a stage, now and then those of the next units too, in another way."""
    s = int(table.choosing[below(random, len(table.choosing))])
    i = below(random, table.units)
    way = below(random, table.classes[s].drawn - 1)
    way += way >= way_of(table, merged, s, i)
    count = 1 if below(random, 4) else 1 + below(random, 1 << (1 + below(random, 4)))
    for j in range(i, min(i + count, table.units)):
        if way_of(table, merged, s, j) != way and not set_way(table, merged, touched, random, s, j, way):
            return False
    return True


@njit(cache=True)
def _exchange_ways(table: Table, merged: Merged, touched: Ints, random: Word) -> bool:
    """Let two activations of a stage, of near units, change ways: how many there are of each stays the same."""
    s = int(table.choosing[below(random, len(table.choosing))])
    i = below(random, table.units)
    way = way_of(table, merged, s, i)
    for _ in range(8):
        j = max(0, min(table.units - 1, i - 8 + below(random, 17)))
        other = way_of(table, merged, s, j)
        if other != way:
            return set_way(table, merged, touched, random, s, i, other) and set_way(
                table, merged, touched, random, s, j, way
            )
    return True


@njit(cache=True)
def _reorder(table: Table, merged: Merged, touched: Ints, random: Word) -> None:
    """Let two microbatches change places, or one move to the place of another and those between move up.

    What runs after what stays as it is, by places; so do ways and copies. Only what ops cost changes.
    """
    slices = table.slices
    for _ in range(8):
        i = below(random, table.units // slices)
        distance = 1 + below(random, 1 << below(random, 7))
        j = max(0, i - distance) if below(random, 2) else min(table.units // slices - 1, i + distance)
        if _unit_class(table, merged, i * slices) != _unit_class(table, merged, j * slices):
            break
    else:
        return
    if below(random, 2):
        _exchange_units(table, merged, touched, i, j)
    else:
        step = 1 if j > i else -1
        for k in range(i, j, step):
            _exchange_units(table, merged, touched, k, k + step)
    if table.spans:  # devices may begin at other times even where all ends are as before: time it to the end
        for g in range(len(table.first)):
            if touched[1, g] >= 0:
                touched[1, g] = table.first[g] + merged.length[g] - 1


@njit(cache=True)
def _unit_class(table: Table, merged: Merged, i: int) -> int:
    """The unit class of the unit at a place among forwards."""
    return int(merged.ops[merged.place[i]] >> table.way_shift) // table.ways


@njit(cache=True)
def _exchange_units(table: Table, merged: Merged, touched: Ints, i: int, j: int) -> None:
    """Let the microbatches at two places change these, slice by slice."""
    for q in range(table.slices):
        one, other = i * table.slices + q, j * table.slices + q
        classes = (_unit_class(table, merged, other), _unit_class(table, merged, one))
        for k in range(2):
            unit = other if k else one
            for c in range(len(KINDS) * table.stages):
                x = c << table.shift | unit
                if merged.place[x] >= 0:
                    way = int(merged.ops[merged.place[x]] >> table.way_shift) % table.ways
                    renumber(table, merged, touched, x, classes[k] * table.ways + way)


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
def keeps_budgets(table: Table, merged: Merged, levels: Ints, touched: Ints, g: int, repairs: int, pull: bool) -> bool:
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
def _repair(table: Table, merged: Merged, touched: Ints, q: int, pull: bool) -> bool:
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
