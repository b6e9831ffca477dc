"""One way to set up CP-SAT from the limits of a search, whatever the model."""

from __future__ import annotations

from ortools.sat.python import cp_model

from solver.limits import Cancel, Limits


def solve_unless_cancelled(
    solver: cp_model.CpSolver,
    model: cp_model.CpModel,
    cancel: Cancel,
    callback: cp_model.CpSolverSolutionCallback | None = None,
) -> tuple[cp_model.CpSolverStatus, float]:
    """Solve a model until the solver's own limits or `cancel`: the status, and the deterministic work done.

    A solver that has not begun does not hear `stop_search`: where the cancel came while the model was built, it is not
    begun, and the status is UNKNOWN.
    """
    with cancel.calling(solver.stop_search):
        if cancel.requested:
            return cp_model.UNKNOWN, 0.0
        status = solver.solve(model, callback)
    return status, solver.response_proto.deterministic_time


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
