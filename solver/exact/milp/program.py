"""The mixed-integer program as arrays, and HiGHS with it."""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np
from scipy.sparse import csr_matrix

from optpipe.problem import Problem
from solver.exact.milp.constraints import Constraints
from solver.exact.milp.cuts import add_cuts
from solver.exact.milp.objective import add_objective
from solver.exact.milp.options import DEFAULT, Options
from solver.exact.milp.variables import Variables
from solver.exact.milp.windows import Floats


@dataclass(frozen=True)
class Program:
    """Minimise the objective column subject to ``matrix @ columns >= row_lower`` and ``lower <= columns <= upper``."""

    variables: Variables
    matrix: csr_matrix
    row_lower: Floats
    lower: Floats
    upper: Floats


def build(
    problem: Problem, horizon_us: float, bound_us: float, value_us: float = float("inf"), options: Options = DEFAULT
) -> Program:
    """The whole model. No op ends later than `horizon_us`, no value is below `bound_us`.

    Schedules with a value above `value_us` may be left out.
    """
    variables = Variables(problem, horizon_us, value_us, options)
    constraints = Constraints(variables, options)
    constraints.add_all()
    add_objective(variables, constraints.rows, options)
    add_cuts(variables, constraints.rows, options)
    matrix, row_lower = constraints.rows.matrix(variables.size)
    lower, upper = variables.bounds()
    if options.bound:
        lower[variables.objective] = min(bound_us / variables.unit_us, upper[variables.objective])
    return Program(variables, matrix, row_lower, lower, upper)


def load(program: Program) -> highspy.Highs:
    """A silent HiGHS with the program."""
    lp = highspy.HighsLp()
    lp.num_row_, lp.num_col_ = program.matrix.shape
    cost = np.zeros(lp.num_col_)
    cost[program.variables.objective] = 1.0
    lp.col_cost_ = cost
    lp.col_lower_ = program.lower
    lp.col_upper_ = program.upper
    lp.row_lower_, lp.row_upper_ = program.row_lower, np.full(lp.num_row_, highspy.kHighsInf)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_ = program.matrix.indptr, program.matrix.indices
    lp.a_matrix_.value_ = program.matrix.data
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [kinds[binary] for binary in program.variables.is_binary().astype(int)]
    highs = highspy.Highs()
    highs.silent()
    highs.passModel(lp)
    return highs
