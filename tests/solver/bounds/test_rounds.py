"""Rounds by hand, against the exact optimum of one device, and where they say nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds.rounds import round_bounds_us
from solver.exact.cp_sat.model import solve_cp_sat
from solver.exact.relaxation import projected
from solver.floor import serial_orders
from solver.limits import Limits, Start
from tests.problems import HALF, WHOLE, instance, uniform


def first(m: int, budget: int, kept: int, **more: Any) -> float:
    """The bound from the first of four devices: F, B and W of 10 us, turnaround 66 us, activations of 2 bytes."""
    objective = "device_span"
    return round_bounds_us(uniform(4, m, budget=budget, backward_weight_bytes=kept, objective=objective, **more))[0]


@pytest.mark.parametrize("m", [2, 5, 8])
def test_one_microbatch_at_a_time(m: int) -> None:
    assert first(m, 2, kept=2) == m * 96
    assert first(m, 2, kept=0) == m * 86 + 10


def test_the_last_round_begins_as_late_as_the_work_of_those_before_it_in_it() -> None:
    """Two fit; of seven microbatches three rounds, of eight another that begins with F, B and W of the other."""
    assert first(7, 4, kept=2) == 4 * 96
    assert first(8, 4, kept=2) == 4 * 96 + 30


def test_weights_that_fit_beside_the_activations_may_wait() -> None:
    """A byte over holds one pending W: rounds of 86 us, but all eight W run before the end."""
    assert first(7, 5, kept=1) == 3 * 86 + 96
    assert first(7, 5, kept=2) == 4 * 96 == first(7, 4, kept=1)


@pytest.mark.parametrize("budget", [1, 16, None])
def test_nothing_to_say_where_none_or_all_fit(budget: int | None) -> None:
    problem = uniform(4, 8, budget=budget)
    assert set(round_bounds_us(problem)) == {0.0}


def test_of_others_only_what_never_leaves_takes_room() -> None:
    """Of 4 bytes the F that starts takes 2, so that two halves and no pending W remain beside it: three in flight."""
    assert first(7, 4, kept=1, offload=HALF) == 3 * 96
    assert first(8, 4, kept=1, offload=HALF) == 3 * 96 + 30
    assert first(8, 4, kept=1, offload=WHOLE) == 0.0


def test_nothing_to_say_with_more_stages() -> None:
    assert set(round_bounds_us(uniform(4, 8, budget=4, v_shape=True))) == {0.0}


def test_the_way_to_a_device_and_back_comes_on_top() -> None:
    problem = uniform(4, 8, budget=2, backward_weight_bytes=2)
    assert round_bounds_us(problem)[3] == 3 * 11 + 8 * 30 + 3 * 11
    assert round_bounds_us(problem)[0] == 8 * 96


def test_is_the_optimum_of_the_first_device_alone() -> None:
    problem = instance("a-p4-m8-c0-b1o2-linear-make")
    alone = projected(problem, [0, len(problem.stages) - 1])
    assert round_bounds_us(problem)[0] == optimum_us(alone, work=2.0)


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 6), st.integers(2, 9), st.integers(0, 4), st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_no_schedule_is_below(m: int, budget: int, kept: int, times: list[int]) -> None:
    data = uniform(2, m, budget=budget, backward_weight_bytes=kept, objective="device_span").to_data()
    for stage in data["stages"]:
        stage |= dict(zip(("forward_us", "backward_input_us", "backward_weight_us"), times, strict=True))
    problem = Problem.from_data(data)
    if kept <= budget:
        assert max(round_bounds_us(problem)) <= optimum_us(problem, work=0.3) + 1e-9


def optimum_us(problem: Problem, work: float) -> float:
    """The best value found, which the work is enough to prove for problems as small as these."""
    orders = serial_orders(problem)
    assert orders is not None
    value_us = simulate(problem, orders).value_us
    limits = Limits(workers=1, deterministic_limit=work)
    return solve_cp_sat(problem, limits, Start(0.0, 2 * value_us, orders, value_us), lambda _: None).value_us
