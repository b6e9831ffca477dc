"""The arrays that HiGHS solves are the model that the statement defines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import highspy
import pulp
import pytest
from hypothesis import given, settings

from optpipe.problem import Problem
from solver.exact.milp.options import Options
from solver.exact.milp.program import Program, build
from solver.exact.milp.statement import export, state
from tests.problems import HALF, problems, uniform

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
    program = build(problem, horizon, 1.0, value_us, options)
    assert Counter(map(stated_row, statement.constraints())) == Counter(built_rows(program))
    columns = {c.name: (c.lowBound, c.upBound, c.cat == pulp.LpInteger) for c in statement.variables()}
    binary = program.variables.is_binary().tolist()
    bounds = zip(program.lower.tolist(), program.upper.tolist(), binary, strict=True)
    assert columns == dict(zip(program.variables.names, bounds, strict=True))
    assert {c.name: v for c, v in statement.objective.items()} == {"objective": 1.0}


OPTIONS = {
    "all": Options(),
    "no windows": Options(windows=False),
    "no cuts": Options(chains=False, workloads=False, triangles=False, work=False, weight_order=False, bound=False),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@settings(deadline=None, max_examples=25)
@given(problem=problems())
def test_same_columns_and_rows(options: Options, problem: Problem) -> None:
    assert_same_model(problem, 500.0, float("inf"), options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_same_columns_and_rows_where_everything_is_open(options: Options) -> None:
    assert_same_model(EVERYTHING, 500.0, 400.0, options)
    families = {name.split("_")[0] for name in build(EVERYTHING, 500.0, 0.0, 400.0, options).variables.names}
    decisions = {"order", "leaves", "started", "ended", "away", "ahead", "returned", "counted"}
    assert families == {"start", "objective"} | decisions


@pytest.mark.parametrize("ending", [".lp", ".mps"])
def test_an_exported_model_has_the_same_optimum(tmp_path: Path, ending: str) -> None:
    problem = uniform(3, 4, budget=4, offload=HALF)
    path = tmp_path / f"model{ending}"
    statement = state(problem, 200.0, 0.0)
    export(statement, path)
    highs = highspy.Highs()
    highs.silent()
    highs.readModel(str(path))
    highs.run()
    assert highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    unit_us = build(problem, 200.0, 0.0).variables.unit_us
    assert highs.getObjectiveValue() * unit_us == pytest.approx(164.0)
