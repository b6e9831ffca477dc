"""`auto`: which searches run on a problem, side by side or one after another."""

from __future__ import annotations

from collections.abc import Sequence

from optpipe.problem import Problem
from solver.exact.cp_sat.model import solve_cp_sat
from solver.lanes import Lane, Turn


def auto_lanes(problem: Problem, workers: int) -> Sequence[Lane]:
    """The lanes for a problem of this size on so many cores."""
    return [[Turn("cp-sat", solve_cp_sat, 1.0, workers)]]
