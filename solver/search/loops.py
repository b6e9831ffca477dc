"""Plain loops over arrays for compiled code: numba takes seconds to compile slices that are assigned or compared."""

from __future__ import annotations

from typing import Any

from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]


@njit(cache=True)
def copy(source: Array, target: Array) -> None:
    """Copy one array over another of the same length."""
    for k in range(len(source)):
        target[k] = source[k]


@njit(cache=True)
def fill(target: Array, value: float) -> None:
    """Set every element."""
    for k in range(len(target)):
        target[k] = value


@njit(cache=True)
def equal(one: Array, other: Array) -> bool:
    """Whether two arrays of the same length are equal."""
    for k in range(len(one)):  # noqa: SIM110 (numba compiles no all())
        if one[k] != other[k]:
            return False
    return True
