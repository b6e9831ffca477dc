"""One way to set up CP-SAT from the limits of a search, whatever the model."""

from __future__ import annotations

from ortools.sat.python import cp_model

from solver.limits import Limits


def configured_solver(limits: Limits) -> cp_model.CpSolver:
    """A solver that stops at the limits' gap and time, or after their deterministic amount of work."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = limits.workers
    solver.parameters.random_seed = limits.seed
    solver.parameters.relative_gap_limit = limits.gap
    solver.parameters.catch_sigint_signal = False
    if limits.deterministic_limit is None:
        solver.parameters.max_time_in_seconds = limits.time_left_s
    else:
        solver.parameters.max_deterministic_time = limits.deterministic_limit
    return solver
