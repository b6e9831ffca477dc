"""The gap: how far a value may be from the optimum."""

from __future__ import annotations


def gap_of(value_us: float, bound_us: float) -> float:
    """``(value - bound) / value``, a share of the value; 0 where that is 0 itself."""
    return (value_us - bound_us) / value_us if value_us else 0.0
