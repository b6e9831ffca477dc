"""The program that HiGHS solves, written for other solvers."""

from __future__ import annotations

from pathlib import Path

import pytest
from ortools.linear_solver.python import model_builder

from instances import HALF, WHOLE, uniform
from optpipe.errors import InputError
from optpipe.problem import Problem
from solver.model_export import export_model
from tests.solver.exact.milp.evidence import assert_another_solver_finds_the_optimum

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
