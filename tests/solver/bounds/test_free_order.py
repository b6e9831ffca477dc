"""The bound of a free order: over pairs of a first and a last microbatch, never above an optimum."""

from __future__ import annotations

from random import Random

import pytest

from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.bounds.free_order import free_order_bound_us
from solver.bounds.unit_costs import UnitCosts
from solver.exact.cp_sat.model import solve_cp_sat
from solver.limits import Limits
from solver.solution import Solution
from solver.solve import solve
from tests.unequal import random_orders, random_pipeline, times, unequal


def test_the_first_and_the_last_are_not_the_same() -> None:
    """Costs 1 and 3, fused: beside its 12 of work the second device waits 1 and 6 if 1 is first, more if 3 is."""
    problem = unequal(2, 2, microbatch_factors=times(1, 3), microbatch_order="free", split_backward=False)
    assert free_order_bound_us(UnitCosts.of(problem)) == 19
    assert solve(problem, "cp-sat", Limits(60, workers=1)).value_us == 19


@pytest.mark.parametrize("objective", ["makespan", "device_span"])
def test_it_is_not_above_an_optimum(objective: str) -> None:
    """Three microbatches with slices and transfers, whose order CP-SAT chooses."""
    problem = unequal(
        2, 3, microbatch_factors=times(3, 1, 2), microbatch_order="free", split_backward=False, transfer_us=1,
        slices={"count": 2, "factors": {"forward": [1, 2]}}, objective=objective,
    )  # fmt: skip
    optimum = solve(problem, "cp-sat", Limits(120, workers=1))
    assert optimum.status == "optimal"
    assert free_order_bound_us(UnitCosts.of(problem)) <= optimum.value_us


def test_the_best_schedules_found_are_not_below() -> None:
    """Most of these bounds are optima."""
    met = problems = 0
    for seed in range(8):
        rng = Random(seed)
        data = random_pipeline(rng).to_data()
        own = [{"time": rng.choice([1, 2, 3]), "transfer": rng.choice([1, 2])} for _ in range(data["microbatches"])]
        problem = Problem.from_data(data | {"microbatch_order": "free", "microbatch_factors": own})
        if not problem.has_free_order:
            continue
        orders = random_orders(problem, rng)[0]
        start = Solution(orders, simulate(problem, orders).value_us, 0.0)
        found = solve_cp_sat(problem, Limits(workers=1, deterministic_limit=0.1), start, lambda _: None)
        bound_us = max(free_order_bound_us(UnitCosts.of(problem)), lower_bound_us(problem))
        assert bound_us <= found.value_us * (1 + 1e-9), seed
        met += bound_us >= found.value_us * (1 - 1e-9)
        problems += 1
    assert met > problems / 2 > 2


def test_too_many_pairs_are_left_out() -> None:
    problem = unequal(4, 128, microbatch_factors=times(*range(1, 129)), microbatch_order="free")
    assert free_order_bound_us(UnitCosts.of(problem)) == 0
