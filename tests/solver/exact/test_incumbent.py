"""A bound above a value contradicts it and is refused; one that says nothing about all schedules is not taken."""

from __future__ import annotations

import pytest

from instances import uniform
from optpipe.errors import VerificationError
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import build_schedule
from solver.exact.incumbent import Incumbent
from solver.limits import Limits
from solver.published.one_stage import one_f_one_b
from solver.serial import serial_orders
from solver.solution import Solution


def incumbent(
    problem: Problem, orders: Orders | None, seen: list[Solution] | None = None, has_optimum: bool = True
) -> Incumbent:
    value_us = simulate(problem, orders).value_us if orders else float("inf")
    start, on_solution = Solution(orders, value_us, 0.0), (seen if seen is not None else []).append
    return Incumbent(problem, Limits(), start, on_solution, has_optimum=has_optimum)


def test_a_contradiction_is_kept_and_refused_at_the_end() -> None:
    problem = uniform(2, 4, budget=8)
    orders = one_f_one_b(problem)
    search = incumbent(problem, orders)
    search.raise_bound(search.value_us * 1.01)
    assert search.bound_us > search.value_us
    with pytest.raises(VerificationError, match=r"bound_us.*above the value"):
        build_schedule(problem, orders, search.answer.bound_us, "test", 0.0)


def test_bounds_of_models_without_the_fused_backwards_that_may_be_best_are_not_taken() -> None:
    problem = uniform(2, 4, budget=8)
    search = incumbent(problem, one_f_one_b(problem), has_optimum=False)
    search.raise_bound(search.value_us * 0.99)
    assert search.bound_us == 0.0


def test_rounding_is_no_contradiction() -> None:
    problem = uniform(2, 4, budget=8)
    search = incumbent(problem, one_f_one_b(problem))
    search.raise_bound(search.value_us * (1 + 1e-12))
    assert search.bound_us == search.value_us


def test_better_orders_come_with_their_bound_and_a_nearer_horizon() -> None:
    problem = uniform(2, 4, budget=8)
    seen: list[Solution] = []
    search = incumbent(problem, serial_orders(problem), seen)
    before_us = search.value_us
    better = one_f_one_b(problem)
    search.offer(better, 50.0)
    search.offer(better, 60.0)
    assert search.value_us == search.horizon_us == simulate(problem, better).value_us < before_us
    assert [(answer.value_us, answer.bound_us) for answer in seen] == [(search.value_us, 50.0)]
    assert search.bound_us == 60.0


def test_orders_over_the_budget_are_not_taken_but_their_bound_is() -> None:
    problem = uniform(2, 4, budget=2)
    search = incumbent(problem, None)
    search.offer(one_f_one_b(uniform(2, 4, budget=8)), 10.0)
    assert search.orders is None
    assert search.bound_us == 10.0
