"""Export of problems as mixed-integer models, for other solvers."""

from __future__ import annotations

from optpipe.errors import InputError, Issue
from optpipe.problem import Problem
from solver.exact.milp.statement import Statement, state_in_us
from solver.exact.milp.variables import has_every_schedule
from solver.limits import Limits
from solver.methods import METHODS, refuse_unsupported
from solver.scale import count_milp_ops
from solver.solution import Solution
from solver.strategy import SharedIncumbent
from solver.warm_starts import offer_published

MOST_OPS = 1000
"""The largest model that is exported: on one device it has 665,000 rows, and takes half a minute and 2 GB."""


def export_model(problem: Problem) -> Statement:
    """State the model of a problem, with what the published schedules and the bounds say of it.

    Schedules with a value above that of the best published one are left out, which narrows every window; not where the
    model lacks fused backwards that may need less memory than split ones. Raises InputError
    where the model would be too large, MethodError where it does not cover what stages may do.
    """
    ops = count_milp_ops(problem)
    if ops > MOST_OPS:
        detail = (
            f"are {ops} ops of F, B, W, O, R and C together, but a model is written for at most {MOST_OPS}: it has "
            "rows for every pair of a device's ops. Maybe take fewer microbatches, or stages with more layers."
        )
        raise InputError([Issue("stages times microbatches", "too_large", detail)])
    refuse_unsupported(METHODS["milp"], problem)
    shared = SharedIncumbent(problem, Limits(workers=1), None)
    offer_published(problem, shared)
    start = shared.best
    if not has_every_schedule(problem):
        start = Solution(bound_us=start.bound_us)
    return state_in_us(problem, start)
