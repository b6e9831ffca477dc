"""Random changes of merged sequences that know the problem, compiled."""

from __future__ import annotations

from numba import njit

from solver.search.kernel import Latest, Times
from solver.search.moves import add_offload, drop_offload, earliest, shift, shift_by
from solver.search.random import Word, below, unit
from solver.search.sequence import Merged, size
from solver.search.table import Floats, Ints, O, Table

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
