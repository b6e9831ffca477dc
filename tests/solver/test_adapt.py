"""Schedules for another number of microbatches, made of a known one."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import WHOLE, instance, uniform
from optpipe.errors import OptPipeError
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.adapt import adapt_orders
from solver.build import build_schedule, within_budgets
from solver.limits import Limits
from solver.methods import METHODS, published_orders
from solver.solve import solve
from tests.problems import problems
from tests.recomputing import one_f_one_b, random_recomputing, recomputing
from tests.sample import examples, some


def with_microbatches(problem: Problem, microbatches: int) -> Problem:
    return Problem.from_data(problem.to_data() | {"microbatches": microbatches})


@pytest.mark.parametrize(("method", "name"), [("1f1b", "zb-1.5b-p8-m24-mem1"), ("zb-auto", "zb-1.5b-p8-m24-mem1.5")])
@pytest.mark.parametrize("microbatches", [25, 40, 96])
def test_a_steady_state_goes_on(method: str, name: str, microbatches: int) -> None:
    """More microbatches are as good as the method itself would do them."""
    problem = instance(name)
    target = with_microbatches(problem, microbatches)
    orders = adapt_orders(target, published_orders(METHODS[method], problem), problem.microbatches)
    assert orders is not None
    expected = simulate(target, published_orders(METHODS[method], target)).value_us
    assert simulate(target, orders).value_us == pytest.approx(expected, rel=1e-9)


def test_a_steady_state_is_cut_short() -> None:
    problem = uniform(4, 24, budget=8)
    target = with_microbatches(problem, 12)
    orders = adapt_orders(target, published_orders(METHODS["1f1b"], problem), 24)
    assert orders is not None
    assert simulate(target, orders).value_us == simulate(target, published_orders(METHODS["1f1b"], target)).value_us


@pytest.mark.parametrize("channels", some([{}, {"duplex": False, "shared_by": [[0, 1]]}]))
def test_offloads_go_on(channels: dict[str, Any]) -> None:
    problem = uniform(4, 24, budget=4, offload=WHOLE, copy_channels=channels)
    target = with_microbatches(problem, 48)
    orders = adapt_orders(target, solve(problem, "ada-offload").orders, 24)
    assert orders is not None
    assert any(device.offload for device in orders.devices)
    assert simulate(target, orders).value_us == solve(target, "ada-offload").value_us


@settings(max_examples=examples(100))
@given(problems(max_microbatches=5), st.integers(1, 7))
def test_whatever_comes_out_keeps_the_rules(problem: Problem, microbatches: int) -> None:
    try:
        schedule = solve(problem, "ada-offload", Limits(5, workers=1))
    except OptPipeError:
        return
    target = with_microbatches(problem, microbatches)
    orders = adapt_orders(target, schedule.orders, problem.microbatches)
    if orders is not None:
        assert within_budgets(target, orders, simulate(target, orders))
    else:
        assert microbatches > problem.microbatches or problem.host_memory_bytes is not None


def test_a_smaller_budget_takes_what_fits() -> None:
    roomy, tight = uniform(4, 8, budget=8), uniform(4, 8, budget=6)
    assert adapt_orders(tight, published_orders(METHODS["1f1b"], roomy), 8) is None
    assert adapt_orders(roomy, published_orders(METHODS["1f1b"], roomy), 8) is not None


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("microbatches", [40, 12])
def test_modes_go_on(every: int, microbatches: int) -> None:
    """1F1B that recomputes each microbatch, or every other one, ahead of its gradient."""
    problem = recomputing(4, 24, budget=31)
    target = with_microbatches(problem, microbatches)
    there, expected = (one_f_one_b(one, lambda _, i: "C BW" if i % every == 0 else "BW") for one in (problem, target))
    orders = adapt_orders(target, there, 24)
    assert orders is not None
    assert orders.modes is not None
    assert orders.modes.tolist() == expected.modes.tolist()
    assert simulate(target, orders).value_us == simulate(target, expected).value_us
    assert every == 2 or simulate(target, orders).value_us == microbatches * 4 + 3 * 3


def test_whatever_comes_out_of_modes_keeps_the_rules() -> None:
    """Random schedules have no steady state; the first microbatches of them always do."""
    for seed in some(range(60), 4):
        problem, orders = random_recomputing(Random(seed))
        for microbatches in (1, 2, 5):
            target = with_microbatches(problem, microbatches)
            adapted = adapt_orders(target, orders, problem.microbatches)
            assert adapted is not None or microbatches > problem.microbatches
            if adapted is not None:
                build_schedule(target, adapted, 0.0, "adapted", 0.0)
