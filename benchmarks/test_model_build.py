"""Build time of the exact models for the large case of the OptPipe paper: 4 devices, 53 microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from instances import HALF, uniform
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.exact.cp_sat.model import build_model as build_cp_sat
from solver.exact.milp.model import build_program as build_milp
from solver.exact.milp.model import load_program
from solver.exact.ticks import TimeGrid
from solver.published.zb_auto import zb_auto

PROBLEMS = {"no offload": uniform(4, 53, budget=8), "offload": uniform(4, 53, budget=4, offload=HALF)}


def _cp_sat(problem: Problem, horizon_us: float) -> Any:
    return build_cp_sat(problem, TimeGrid.of(problem, horizon_us), horizon_us, 0.0)


def _milp(problem: Problem, horizon_us: float) -> Any:
    return load_program(build_milp(problem, horizon_us, 0.0, horizon_us))


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
@pytest.mark.parametrize("build", [_cp_sat, _milp], ids=["cp-sat", "milp"])
def test_model_build(benchmark: Any, build: Callable[[Problem, float], Any], problem: Problem) -> None:
    horizon_us = simulate(problem, zb_auto(problem)).value_us
    model = benchmark.pedantic(build, (problem, horizon_us), rounds=3)
    assert model is not None
