"""Export of problems as mixed-integer models, for other solvers: those that `milp` solves, written by PuLP."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pulp

from optpipe.errors import InputError, Issue
from optpipe.problem import Problem
from solver.exact.milp.model import Program, build_program
from solver.exact.milp.variables import has_every_schedule
from solver.limits import Limits
from solver.methods import METHODS, refuse_unsupported
from solver.scale import count_milp_ops, horizon_us
from solver.solution import Solution
from solver.strategy import SharedIncumbent
from solver.warm_starts import offer_published

MOST_OPS = 1000
"""The largest model that is exported: on one device it has 665,000 rows, and takes half a minute and 2 GB."""


@dataclass(frozen=True)
class Statement:
    """The whole model of a problem, as other solvers read it: its objective is in us, its times in `time_unit_us`."""

    model: pulp.LpProblem
    time_unit_us: float

    @property
    def rows(self) -> int:
        """The number of constraints."""
        return len(self.model.constraints())

    @property
    def columns(self) -> int:
        """The number of variables."""
        return len(self.model.variables())

    @property
    def integer_columns(self) -> int:
        """The number of variables that are 0 or 1."""
        return sum(column.cat == pulp.LpInteger for column in self.model.variables())

    def to_text(self, form: Literal["lp", "mps"]) -> str:
        """Write the model in the LP format of CPLEX, or as free MPS."""
        with TemporaryDirectory() as folder:  # PuLP writes to files alone
            path = Path(folder) / "model"
            if form == "lp":
                self.model.writeLP(str(path))
            else:
                self.model.writeMPS(str(path))
            return path.read_text()


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
    horizon = horizon_us(problem, start.value_us)
    return _stated(build_program(problem, horizon, start.bound_us, start.value_us))


def _stated(program: Program) -> Statement:
    """The program with a name for each row and column, and its objective in us."""
    variables, matrix = program.variables, program.matrix
    model = pulp.LpProblem("schedule", pulp.LpMinimize)
    kinds = [pulp.LpInteger if binary else pulp.LpContinuous for binary in variables.is_binary()]
    bounds = zip(program.lower.tolist(), program.upper.tolist(), strict=True)
    columns = [
        model.add_variable(name, *bound, kind) for name, bound, kind in zip(variables.names, bounds, kinds, strict=True)
    ]
    model.setObjective(variables.unit_us * columns[variables.objective])
    names = program.rows.names([name.removeprefix("start_") for name in variables.names])
    terms = [(columns[c], value) for c, value in zip(matrix.indices.tolist(), matrix.data.tolist(), strict=True)]
    for name, least, row in zip(names, program.row_lower.tolist(), pairwise(matrix.indptr.tolist()), strict=True):
        model.addConstraint(pulp.LpAffineExpression(terms[slice(*row)]) >= least, name)
    return Statement(model, variables.unit_us)
