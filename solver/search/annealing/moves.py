"""Changes of merged sequences: shifts of ops within the room that dependencies leave, offloads added and dropped.

A change is made in place; ``touched[0, g]`` and ``touched[1, g]`` are the first and last place of group g that it
touches, so that it can be kept or taken back. Every change leaves each group's sequence in an order that its own
dependencies allow; what another group makes impossible shows as a deadlock in the sweep.
"""

from __future__ import annotations

from numba import njit

from solver.search.sequence import Merged
from solver.search.table import NONE, B, Ints, O, R, Table, W

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
