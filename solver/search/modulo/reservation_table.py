"""The modulo reservation table of a device: where on its circle a pass may start beside those that are placed.

The table is that of modulo scheduling (Rau and Glaeser 1981, Lam 1988, Rau 1994): a pass that starts at t occupies its
device at t modulo the period. With all of a device's time taken a place counts only where the rest of its passes still
fits.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from optpipe.ops import Floats

PACKING_STEPS = 200
"""Trials after which passes count as not fitting: enough for the devices of any published placement."""

MANY = 6
"""With more passes left than this, gaps next to a pass are left for single passes only, not for pairs."""


@njit(cache=True)
def packs(gaps: Floats, lengths: Floats, tolerance: float) -> bool:
    """True if passes of these lengths (longest first) fit into the gaps, by depth-first search of limited length.

    Bin packing, so hard in general; but gaps and passes are few, and with the longest first dead ends come early.
    """
    count = len(lengths)
    if lengths.sum() > gaps.sum() + tolerance:
        return False
    if count == 0:
        return True
    room = gaps.copy()
    chosen = np.full(count, -1, np.int64)
    depth = 0
    for _ in range(PACKING_STEPS):
        gap = chosen[depth]
        if gap >= 0:
            room[gap] += lengths[depth]
        gap += 1
        while gap < len(room) and room[gap] + tolerance < lengths[depth]:
            gap += 1
        if gap < len(room):
            room[gap] -= lengths[depth]
            chosen[depth] = gap
            depth += 1
            if depth == count:
                return True
        else:
            chosen[depth] = -1
            depth -= 1
            if depth < 0:
                return False
    return False


@njit(cache=True)
def _gaps_around(
    at: float, length: float, period: float, starts: Floats, lengths: Floats, gaps: Floats, tolerance: float
) -> bool:
    """Write to `gaps` the gaps between placed passes and a new one at `at`; False where the new one overlaps."""
    filled = 0
    placed = False
    count = len(starts)
    for k in range(count):
        begin = starts[k] + lengths[k]
        size = (starts[k + 1] if k + 1 < count else starts[0] + period) - begin
        offset = (at - begin) % period
        if offset > period - tolerance:
            offset = 0.0
        if not placed and offset + length <= size + tolerance:
            gaps[filled] = offset
            gaps[filled + 1] = max(0.0, size - offset - length)
            filled += 2
            placed = True
        else:
            gaps[filled] = size
            filled += 1
    return placed


@njit(cache=True)
def nearest_start(
    preferred: float,
    direction: int,
    skip: int,
    length: float,
    period: float,
    starts: Floats,
    lengths: Floats,
    left: Floats,
    tolerance: float,
) -> float:
    """The start nearest to `preferred`, at or after it (`direction` 1) or at or before it (-1), not reduced modulo T.

    `starts` (ascending, in [0, period)) and `lengths` are the passes that are placed, `left` the lengths (longest
    first) of those that still have to fit beside them. `skip` passes over that many places. NaN where none is left.

    Only places that are tight on one side are tried: at the preferred time, or against a placed pass with room for
    none, one or two of those left in between. With all of a device's time taken a gap must be filled by whole passes,
    so that few other places can be completed.
    """
    count, waiting = len(starts), len(left)
    if count == 0:
        return preferred
    places = np.empty(1 + count * (1 + waiting + waiting * waiting))
    places[0] = 0.0
    filled = 1
    for k in range(count):
        side = starts[k] + lengths[k] - preferred if direction > 0 else preferred + length - starts[k]
        places[filled] = side % period
        filled += 1
        for a in range(waiting):
            if a and left[a] == left[a - 1]:
                continue
            places[filled] = (side + left[a]) % period
            filled += 1
            for b in range(a if waiting <= MANY else 0):
                places[filled] = (side + left[a] + left[b]) % period
                filled += 1
    gaps = np.empty(count + 1)
    last = -1.0
    for away in np.sort(places[:filled]):
        if away >= period - tolerance:
            break
        if away - last <= tolerance:
            continue
        at = (preferred + direction * away) % period
        if not _gaps_around(at, length, period, starts, lengths, gaps, tolerance) or not packs(gaps, left, tolerance):
            continue
        last = away
        if skip == 0:
            return float(preferred + direction * away)
        skip -= 1
    return float(np.nan)
