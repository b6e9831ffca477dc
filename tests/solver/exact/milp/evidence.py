"""The mixed-integer program held against schedules that are known, and against other solvers."""

from __future__ import annotations

from pathlib import Path

import highspy
import numpy as np
import pytest

from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.exact.milp.model import Program, Timing, build_program, point_from_orders
from solver.exact.milp.variables import Options
from solver.limits import Limits
from solver.model_export import export_model
from solver.scale import horizon_us
from solver.solve import solve


def assert_is_a_point(problem: Problem, orders: Orders, seed: int) -> tuple[Program, Orders]:
    """Orders within the budgets are a point of the model, and come back from its binaries; returns model and orders."""
    value_us = simulate(problem, orders).value_us
    program = build_program(problem, horizon_us(problem, value_us), 0.0, value_us, Options(weight_order=False))
    point = point_from_orders(program.variables, orders)
    short = program.row_lower - program.matrix @ point
    assert short.max(initial=0.0) <= 1e-6, (seed, int(np.argmax(short)))
    assert (point >= program.lower - 1e-6).all(), seed
    assert (point <= program.upper + 1e-6).all(), seed
    again = Timing(program.variables, program.matrix, program.row_lower).orders(point)
    assert simulate(problem, again).value_us <= value_us * (1 + 1e-9), seed
    return program, again


def assert_another_solver_finds_the_optimum(problem: Problem, path: Path) -> Schedule:
    """HiGHS by itself, in the model as it is written, and CP-SAT, whose schedule is returned."""
    path.write_text(export_model(problem).to_text(path.suffix.removeprefix(".")))
    highs = highspy.Highs()
    highs.silent()
    assert highs.readModel(str(path)) == highspy.HighsStatus.kOk
    highs.run()
    assert highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    optimum = solve(problem, "cp-sat", Limits(300, workers=1))
    assert optimum.status == "optimal"
    assert highs.getObjectiveValue() == pytest.approx(optimum.value_us)
    return optimum
