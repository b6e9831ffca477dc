"""List schedules in which memory decides what is recomputed: valid within every budget, no more than it asks for."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from instances import uniform
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.build import build_schedule
from solver.limits import Limits
from solver.search.in_flight import AGAIN, in_flight_search
from solver.search.recompute_lists import ON_ITS_WAY, WHEN_IDLE, WITH_GRADIENT, recompute_lists
from solver.serial import serial_orders
from solver.solution import Solution
from tests.recomputing import FULL, LEAVES, random_pipeline, recomputing

LIGHT = {"name": "light", "kept_bytes": 1, "recompute_us": 1, "forward_workspace_bytes": 0}
WORK = Limits(float("inf"), workers=1, deterministic_limit=10.0)
TENTHS = {"activation_bytes": 20, "backward_weight_bytes": 10}


def offload_or_recompute(p: int, m: int) -> Problem:
    """Half the memory of 1F1B; half of an activation may leave in the time of F, or nearly all is recomputed."""
    problem = uniform(p, m, budget=10 * p, offload={"bytes": 10, "offload_us": 10, "reload_us": 10}, **TENTHS)
    data = problem.to_data()
    for stage in data["stages"]:
        stage["modes"] = [{**LIGHT, "recompute_us": 10, "segment_bytes": 19}]
    return Problem.from_data(data)


@pytest.mark.parametrize("mode", [LIGHT, FULL])
def test_every_choice_is_valid_in_every_budget(mode: dict[str, object]) -> None:
    for budget, in_flight, late, (ahead, behind) in product((12, 15, 23, 40), (1, 3, 9), (0, 3), AGAIN):
        problem = recomputing(4, 10, [mode], budget, backward_weight_bytes=4)
        orders = recompute_lists(problem, [1] * 4, in_flight, late, ahead, behind)
        if orders is None:
            assert budget == 12 or in_flight > 1
            continue
        build_schedule(problem, orders, 0.0, "lists", 0.0)  # verifies it


def test_nothing_is_recomputed_where_memory_has_room() -> None:
    orders = recompute_lists(recomputing(4, 10, [LIGHT], 1000), [1] * 4, 8, 2, ON_ITS_WAY, 4)
    assert orders is not None
    assert orders.modes is not None
    assert not orders.modes.any()


def test_a_stage_without_such_a_mode_keeps_all() -> None:
    problem = recomputing(2, 6, [LIGHT], 20, backward_weight_bytes=4)
    orders = recompute_lists(problem, [1, 0], 6, 0, WITH_GRADIENT, 0)
    assert orders is not None
    assert orders.modes is not None
    assert orders.modes[0].any()
    assert not orders.modes[1].any()
    build_schedule(problem, orders, 0.0, "lists", 0.0)


def test_an_activation_is_made_before_its_gradient_comes_only_where_that_is_allowed() -> None:
    problem = recomputing(4, 10, [FULL], 25, backward_weight_bytes=4)
    ahead = {}
    for moment in (WITH_GRADIENT, ON_ITS_WAY, WHEN_IDLE):
        orders = recompute_lists(problem, [1] * 4, 6, 1, moment, 0)
        assert orders is not None
        ahead[moment] = sum(op.kind == "C" for device in orders.devices for op in device.compute)
    assert ahead[WITH_GRADIENT] == 0 < ahead[ON_ITS_WAY]


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_the_search_keeps_every_rule_and_budget(first: int) -> None:
    for seed in range(first, first + 10):
        problem = random_pipeline(Random(seed))
        if not all(stage.split_backward for stage in problem.stages):
            continue
        floor = serial_orders(problem)
        assert floor is not None
        start = Solution(floor, simulate(problem, floor).value_us)
        best = in_flight_search(problem, WORK, start, lambda _: None)
        assert best.orders is not None
        assert build_schedule(problem, best.orders, 0.0, "lists", 0.0).value_us == best.value_us <= start.value_us


@pytest.mark.parametrize("modes", [[LIGHT], [LIGHT, LEAVES]])
@pytest.mark.parametrize("microbatches", [64, 256])
def test_it_is_as_near_to_the_bound_with_any_number_of_microbatches(
    microbatches: int, modes: list[dict[str, object]]
) -> None:
    """At three eighths of the memory of 1F1B."""
    problem = recomputing(4, microbatches, modes, 15, backward_weight_bytes=10)
    best = in_flight_search(problem, WORK, Solution(), lambda _: None)
    assert best.value_us <= 1.25 * lower_bound_us(problem)


def test_with_modes_it_finds_what_it_does_without() -> None:
    problem = offload_or_recompute(8, 64)
    found: list[Solution] = []
    best = in_flight_search(problem, WORK, Solution(), found.append)
    assert found[-1] == best
    assert best.orders is not None
    assert best.orders.modes is not None
    assert best.orders.modes.any()
    assert build_schedule(problem, best.orders, 0.0, "lists", 0.0).value_us == best.value_us
    without = in_flight_search(problem.without_modes(), WORK, Solution(), lambda _: None)
    assert best.value_us <= without.value_us
