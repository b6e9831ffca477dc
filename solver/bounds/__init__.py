"""What no schedule can beat, and why."""

from solver.bounds.closed_form import lower_bound_us
from solver.bounds.paths import longest_chain_us
from solver.bounds.split_backward import split_backward_suffices
from solver.bounds.windows import window_bounds_us

__all__ = ["longest_chain_us", "lower_bound_us", "split_backward_suffices", "window_bounds_us"]
