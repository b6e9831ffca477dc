"""Ops that wait for one another in a circle, found among ops that have times.

An op that takes time ends after it starts, so times that keep every rule leave no room for a circle through it. Ops
without length can share an instant and wait for one another there: every time is kept, and yet no executor could begin.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def find_circle(op: Ints, before: Ints, start_us: Floats) -> list[int] | None:
    """Some places of ops each of which waits for the one before it, the first for the last; None if there are none.

    The op at place `op[k]` waits for the one at place `before[k]`; `start_us` holds the starts of all ops, whether
    they keep the rules or not.
    """
    # Along a circle starts go forward as far as back, so none of its steps goes further forward than all steps that
    # there are go back (but for rounding): of most schedules hardly any is left to look at.
    forward_us = start_us[op] - start_us[before]
    chosen = np.flatnonzero(forward_us <= -1.001 * forward_us.clip(max=0).sum())
    needs: dict[int, list[int]] = {}
    for k, earlier in zip(op[chosen].tolist(), before[chosen].tolist(), strict=True):
        needs.setdefault(k, []).append(earlier)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return list(error.args[1][:-1])
    return None
