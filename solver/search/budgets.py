"""Memory along merged sequences, compiled: whether budgets are kept, and repairs where they are not."""

from __future__ import annotations

import numpy as np
from numba import njit

from solver.search.loops import fill
from solver.search.moves import earliest, last, shift
from solver.search.sequence import Merged
from solver.search.table import Ints, Table

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
    """Whether the sequence of a group keeps the budgets of its devices, after up to `repairs` further shifts.

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
