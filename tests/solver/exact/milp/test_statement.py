"""The arrays that HiGHS solves are the model that the statement defines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import highspy
import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from ortools.linear_solver.python import model_builder

from instances import HALF, WHOLE, uniform
from optpipe.errors import InputError
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.exact.milp.model import Program, Timing, build_program, point_from_orders
from solver.exact.milp.statement import state
from solver.exact.milp.variables import Options
from solver.limits import Limits
from solver.model_export import export_model
from solver.scale import horizon_us
from solver.solve import solve
from tests.problems import problems
from tests.sample import examples

Row = tuple[frozenset[tuple[str, float]], float]

ONE_CHANNEL = {"duplex": False, "shared_by": [[0, 1, 2]]}
EVERYTHING = uniform(3, 4, budget=4, offload=HALF, host_memory_bytes=3, copy_channels=ONE_CHANNEL)


def stated_row(row: pulp.LpConstraint) -> Row:
    sign = -1.0 if row.sense == pulp.LpConstraintLE else 1.0
    terms = frozenset((column.name, round(sign * value, 6)) for column, value in row.items() if value)
    return terms, round(-sign * row.constant, 6) + 0.0


def built_rows(program: Program) -> list[Row]:
    names, matrix = program.variables.names, program.matrix
    rows = []
    for k, low in enumerate(program.row_lower):
        part = slice(matrix.indptr[k], matrix.indptr[k + 1])
        terms = zip(matrix.indices[part], matrix.data[part], strict=True)
        rows.append((frozenset((names[c], round(float(v), 6)) for c, v in terms), round(float(low), 6) + 0.0))
    return rows


def assert_same_model(problem: Problem, horizon: float, value_us: float, options: Options) -> None:
    statement = state(problem, horizon, 1.0, value_us, options)
    program = build_program(problem, horizon, 1.0, value_us, options)
    assert Counter(map(stated_row, statement.constraints())) == Counter(built_rows(program))
    columns = {c.name: (c.lowBound, c.upBound, c.cat == pulp.LpInteger) for c in statement.variables()}
    binary = program.variables.is_binary().tolist()
    bounds = zip(program.lower.tolist(), program.upper.tolist(), binary, strict=True)
    assert columns == dict(zip(program.variables.names, bounds, strict=True))
    assert {c.name: v for c, v in statement.objective.items()} == {"objective": 1.0}


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


OPTIONS = {
    "all": Options(),
    "no windows": Options(windows=False),
    "no cuts": Options(chains=False, workloads=False, triangles=False, work=False, weight_order=False, bound=False),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@settings(max_examples=examples(25))
@given(problem=problems())
def test_same_columns_and_rows(options: Options, problem: Problem) -> None:
    assert_same_model(problem, 500.0, float("inf"), options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_same_columns_and_rows_where_everything_is_open(options: Options) -> None:
    assert_same_model(EVERYTHING, 500.0, 400.0, options)
    families = {name.split("_")[0] for name in build_program(EVERYTHING, 500.0, 0.0, 400.0, options).variables.names}
    decisions = {"order", "leaves", "started", "ended", "away", "ahead", "returned", "counted"}
    assert families == {"start", "objective"} | decisions


SMALL = {
    "makespan": uniform(2, 3, budget=4),
    "span": uniform(2, 3, budget=4, objective="device_span"),
    "V": uniform(2, 2, budget=8, v_shape=True, transfer_us=2.5),
    "offload": uniform(3, 4, budget=4, offload=HALF),
    "host": uniform(2, 3, budget=4, offload=WHOLE, host_memory_bytes=2),
}


@pytest.mark.parametrize("form", ["lp", "mps"])
@pytest.mark.parametrize("problem", SMALL.values(), ids=SMALL.keys())
def test_another_solver_finds_the_optimum_in_the_written_model(problem: Problem, form: str, tmp_path: Path) -> None:
    assert_another_solver_finds_the_optimum(problem, tmp_path / f"model.{form}")


@pytest.mark.parametrize("solver", ["sat", "scip"])
def test_solvers_of_or_tools_read_it_too(solver: str, tmp_path: Path) -> None:
    path = tmp_path / "model.mps"
    path.write_text(export_model(SMALL["offload"]).to_text("mps"))
    model = model_builder.Model()
    assert model.import_from_mps_file(str(path))
    search = model_builder.Solver(solver)
    assert search.solve(model) == model_builder.SolveStatus.OPTIMAL
    assert search.objective_value == pytest.approx(164.0)


def test_the_written_model_has_the_fused_backwards_that_need_less_memory(tmp_path: Path) -> None:
    """Fused backwards keep both microbatches, and take nothing beside them; split ones have room for one."""
    problem = uniform(2, 2, budget=4, backward_weight_bytes=4)
    optimum = assert_another_solver_finds_the_optimum(problem, tmp_path / "model.lp")
    assert any(op.kind == "BW" for op in optimum.orders.ops())


def test_rows_and_columns_are_named_by_rule_and_ops() -> None:
    text = export_model(SMALL["offload"]).to_text("lp")
    for name in ("precedence_F0_0_F1_0:", "one_op_at_a_time_F0_1_B0_0:", "memory_R0_3:", "away_has_left_O0_0_F0_1:"):
        assert f"\n{name}" in text
    assert "leaves_0_1" in text
    assert "start_B2_3" in text


def test_a_model_too_large_to_be_written_is_refused() -> None:
    with pytest.raises(InputError, match=r"stages times microbatches are 1,?002 ops .* at most 1,?000"):
        export_model(uniform(2, 167))
