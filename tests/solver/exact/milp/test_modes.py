"""The mixed-integer program decides on activation modes: optima of CP-SAT and of every schedule there is."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.errors import InfeasibleError, NoSolutionError
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds.device import split_backward_suffices
from solver.build import build_schedule, peak_budgets
from solver.exact.milp.model import solve_milp
from solver.limits import Limits
from solver.search.annealing.sequence import merge, orders_from_sequences
from solver.search.annealing.table import build_table
from solver.solution import Solution
from solver.solve import solve
from tests.recomputing import FULL, LEAVES, random_recomputing, recomputing
from tests.sample import examples, some
from tests.solver.exact.cp_sat.test_modes import FAMILIES, schedules
from tests.solver.exact.milp.evidence import assert_another_solver_finds_the_optimum, assert_is_a_point


def tight(seed: int) -> tuple[Problem, Orders]:
    """A random problem, and orders of it with split backwards that need all of its budgets."""
    problem, orders = random_recomputing(Random(seed), split_backward=True)
    table = build_table(problem)
    orders = orders_from_sequences(problem, table, merge(table, simulate(problem, orders)))
    budgets = [{"memory_bytes": size} for size in peak_budgets(problem, orders)]
    return problem.from_data(problem.to_data() | {"devices": budgets}), orders


@pytest.mark.parametrize("first", some(range(0, 120, 12)))
def test_the_model_has_every_schedule(first: int) -> None:
    for seed in range(first, first + 12):
        problem, orders = tight(seed)
        _, again = assert_is_a_point(problem, orders, seed)
        assert problem.has_modes is (again.modes is not None)


@pytest.mark.parametrize("name", FAMILIES)
def test_optima_are_those_of_every_schedule(name: str) -> None:
    devices, microbatches, modes, fields = FAMILIES[name]
    fields = {key: value for key, value in fields.items() if key != "split_backward"}
    values = schedules(recomputing(devices, microbatches, modes, **fields)) if devices == 1 else {}
    for budget in (12, 15, 18, 23):
        problem = recomputing(devices, microbatches, modes, budget, **fields)
        if not split_backward_suffices(problem):
            continue
        optimum = min((value for peaks, value in values.items() if max(peaks) <= budget), default=float("inf"))
        if not values:
            optimum = solve(problem, "cp-sat", Limits(60, workers=1)).value_us
        answer = solve_milp(problem, Limits(60, workers=1), Solution(), lambda _: None)
        assert answer.value_us == answer.bound_us == optimum


@given(st.integers(0, 10_000))
@settings(max_examples=examples(25))
def test_agrees_with_cp_sat(seed: int) -> None:
    """Neither proves what the other refutes, with every kind of copy, and from no schedule at all."""
    problem, _ = tight(seed)
    try:
        other = solve(problem, "cp-sat", Limits(20, workers=1))
    except (InfeasibleError, NoSolutionError):
        return
    answer = solve_milp(problem, Limits(5, workers=1), Solution(), lambda _: None)
    assert answer.bound_us <= other.value_us * (1 + 1e-9)
    assert other.bound_us <= answer.value_us * (1 + 1e-9)
    if answer.orders is not None:
        build_schedule(problem, answer.orders, answer.bound_us, "milp", 0.0)  # which verifies it


@pytest.mark.parametrize("form", ["lp", "mps"])
def test_another_solver_finds_the_optimum_in_the_written_model(form: str, tmp_path: Path) -> None:
    problem = recomputing(2, 3, [FULL, LEAVES], 13)
    path = tmp_path / f"model.{form}"
    assert_another_solver_finds_the_optimum(problem, path)
    text = path.read_text()
    for name in ("way_0_1_2", "gone_0_0_1_F0_2", "start_C0_1_1"):
        assert name in text
