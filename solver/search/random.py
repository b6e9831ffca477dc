"""A small random generator for compiled code, with its state in an array: xorshift64 (Marsaglia 2003).

The generator of numba belongs to a thread; this one belongs to a search, so that a seed gives one run.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

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
