"""The best bound that needs no search."""

from __future__ import annotations

from collections.abc import Sequence

from optpipe.problem import Problem
from solver.bounds.device import longest_chain_us
from solver.bounds.memory_time import memory_time_bounds_us, round_bounds_us
from solver.bounds.warmup_cooldown import warmup_cooldown_bounds_us


def lower_bound_us(problem: Problem) -> float:
    """The best bound known on the problem's objective without search: milliseconds, whatever the size."""
    return max(longest_chain_us(problem), *device_bounds_us(problem))


def device_bounds_us(problem: Problem) -> Sequence[float]:
    """The best bound from each device that has stages."""
    kinds = (warmup_cooldown_bounds_us(problem), memory_time_bounds_us(problem), round_bounds_us(problem))
    return [max(bounds) for bounds in zip(*kinds, strict=True)]
