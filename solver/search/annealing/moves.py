"""Moves of the annealer, compiled: random proposals, each of one or several edits (`edits`).

Ops are shifted within a sequence (the insertion neighbourhood of job shops: van Laarhoven, Aarts and Lenstra 1992;
Dell'Amico and Trubian 1993), mostly ops without slack, since only these can make the schedule shorter. Chains and
diagonals shift many ops alike: good pipeline schedules repeat by microbatch and by stage, and between two of them lie
worse ones that no single shift gets past.
"""

from __future__ import annotations

from numba import njit

from optpipe.ops import Floats, Ints
from solver.search.annealing.edits import (
    add_offload,
    drop_offload,
    earliest,
    last,
    option_of,
    renumber,
    runs_forward,
    set_option,
    shift,
    shift_by,
)
from solver.search.annealing.kernel import Latest, Times
from solver.search.annealing.links import has_links, pass_classes
from solver.search.annealing.sequence import Merged, Word, below, size, time_in_block, time_of_pair, unit
from solver.search.annealing.table import B, O, Table, turned

SHIFT, FILL, CHAIN, DIAGONAL, GRID, OFFLOAD, RELAY, OPTION, EXCHANGE, REORDER, JOIN = range(11)
"""The kinds of moves; OFFLOAD and RELAY need offloads, OPTION and EXCHANGE modes, REORDER a free order of microbatches,
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
        x = _random_op(table, merged, times, latest, random)
        _join_or_part(table, merged, touched, random, x, merged.block_us)
        return True
    if move in (JOIN, REORDER) or (move >= OFFLOAD and len(table.choosing) == 0):
        return True  # by rounding alone, its weight being 0
    if move == OPTION:
        return _change_options(table, merged, touched, random)
    if move == EXCHANGE:
        return _exchange_options(table, merged, touched, random)
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
def _join_or_part(table: Table, merged: Merged, touched: Ints, random: Word, x: int, block_us: Floats | None) -> None:
    """Join a forward near an op and a near backward, now and then those of the next units too; or part a block."""
    if block_us is None:
        return
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
    number = int(merged.ops[at] >> table.option_shift)
    if time_in_block(block_us, forward) >= 0 and below(random, 2):
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
    number = int(merged.ops[merged.place[forward]] >> table.option_shift)
    renumber(table, merged, touched, forward, number + 1 - number % table.options)


@njit(cache=True)
def _chain(table: Table, merged: Merged, touched: Ints, random: Word, x: int, distance: int) -> None:
    """Shift an op and those of the next units alike, in the order in which none blocks the next."""
    mask, slices, forwards = (1 << table.shift) - 1, table.slices, runs_forward(table.stages, x >> table.shift)
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
    """A random number of stages from that of an op on, of devices for a pass, no more than there are."""
    c = x >> table.shift
    left = table.stages - c % table.stages
    if has_links(table.links):
        first_pass, first_barrier = pass_classes(table.links)
        if c >= first_barrier:
            left = 1
        elif c >= first_pass:
            left = table.devices - (c - first_pass) % table.devices
    return int(min(2 + below(random, 8), left))


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
def _change_options(table: Table, merged: Merged, touched: Ints, random: Word) -> bool:
    """Hold some activation of a stage, now and then those of the next units too, in another option."""
    s = int(table.choosing[below(random, len(table.choosing))])
    i = below(random, table.units)
    option = below(random, table.classes[s].drawn - 1)
    option += option >= option_of(table, merged, s, i)
    count = 1 if below(random, 4) else 1 + below(random, 1 << (1 + below(random, 4)))
    for j in range(i, min(i + count, table.units)):
        if option_of(table, merged, s, j) != option and not set_option(table, merged, touched, random, s, j, option):
            return False
    return True


@njit(cache=True)
def _exchange_options(table: Table, merged: Merged, touched: Ints, random: Word) -> bool:
    """Let two activations of a stage, of near units, change options: how many there are of each stays the same."""
    s = int(table.choosing[below(random, len(table.choosing))])
    i = below(random, table.units)
    option = option_of(table, merged, s, i)
    for _ in range(8):
        j = max(0, min(table.units - 1, i - 8 + below(random, 17)))
        other = option_of(table, merged, s, j)
        if other != option:
            return set_option(table, merged, touched, random, s, i, other) and set_option(
                table, merged, touched, random, s, j, option
            )
    return True


@njit(cache=True)
def _reorder(table: Table, merged: Merged, touched: Ints, random: Word) -> None:
    """Let two microbatches change places, or one move to the place of another and those between move up.

    What runs after what stays as it is, by places; so do options and copies. Only what ops cost changes.
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
    return int(merged.ops[merged.place[i]] >> table.option_shift) // table.options


@njit(cache=True)
def _exchange_units(table: Table, merged: Merged, touched: Ints, i: int, j: int) -> None:
    """Let the microbatches at two places change these, slice by slice."""
    for q in range(table.slices):
        one, other = i * table.slices + q, j * table.slices + q
        classes = (_unit_class(table, merged, other), _unit_class(table, merged, one))
        for k in range(2):
            unit = other if k else one
            for c in range(table.keys):
                x = c << table.shift | unit
                if merged.place[x] >= 0:
                    option = int(merged.ops[merged.place[x]] >> table.option_shift) % table.options
                    renumber(table, merged, touched, x, classes[k] * table.options + option)
