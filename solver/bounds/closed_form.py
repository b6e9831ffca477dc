"""The best bound that needs no search."""

from __future__ import annotations

from optpipe.problem import Problem
from solver.bounds.memory_time import memory_time_bounds_us
from solver.bounds.paths import longest_chain_us
from solver.bounds.windows import window_bounds_us


def lower_bound_us(problem: Problem) -> float:
    """The best bound known on the problem's objective without search: milliseconds, whatever the size."""
    return max(longest_chain_us(problem), *window_bounds_us(problem), *memory_time_bounds_us(problem))
