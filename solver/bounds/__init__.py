"""Lower bounds on every schedule, with their proofs."""

from solver.bounds.device import longest_chain_us, split_backward_suffices
from solver.bounds.lower_bound import lower_bound_us
from solver.bounds.warmup_cooldown import warmup_cooldown_bounds_us

__all__ = ["longest_chain_us", "lower_bound_us", "split_backward_suffices", "warmup_cooldown_bounds_us"]
