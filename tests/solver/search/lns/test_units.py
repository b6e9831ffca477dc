"""Windows on slices, unequal microbatches, free orders and whole backwards: every rule kept, optima of CP-SAT met."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import build_schedule, peak_budgets
from solver.limits import Limits
from solver.microbatch_orders import in_order, with_numbers_in_order, with_own_numbers
from solver.search.lns.neighbourhood import with_split_backwards
from solver.search.lns.search import lns_search
from solver.serial import serial_orders
from solver.solution import Solution
from solver.solve import solve
from tests.sample import examples
from tests.solver.search.lns.test_modes import check_windows
from tests.unequal import random_orders, random_unequal, times, unequal


def tight(seed: int) -> tuple[Problem, Orders]:
    """A random problem in a given order with a little more memory than its random orders need as windows have them."""
    rng = Random(seed)
    data = random_unequal(rng)
    for stage in data["stages"]:
        # What a backward leaves beyond what it held counts from its start, when it still has gradients that it frees.
        if any(mode.get("kept_bytes", inf) < stage["backward_weight_bytes"] for mode in stage.get("modes", ())):
            stage.pop("slice_gradient_bytes", None)
    problem = Problem.from_data(data)
    orders = random_orders(problem, rng)[0]
    if problem.microbatch_order == "free":
        own_order = orders.microbatch_order or range(problem.microbatches)
        orders = with_numbers_in_order(problem, orders)
        problem = in_order(problem, list(own_order))
    orders = with_split_backwards(problem, orders)
    budgets = [{"memory_bytes": size + rng.randrange(3)} for size in peak_budgets(problem, orders)]
    return problem.from_data(problem.to_data() | {"devices": budgets}), orders


@given(st.integers(0, 10_000))
@settings(max_examples=examples(30))
def test_a_window_has_the_schedule_at_hand_and_its_solutions_keep_every_rule(seed: int) -> None:
    check_windows(*tight(seed), seed)


CAUSAL = {"count": 2, "factors": {"forward": [1, 2], "backward_input": [2, 3], "bytes": [1, 0.75]}}

FAMILIES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "slices": (2, 2, 16, {"slices": CAUSAL, "slice_gradient_bytes": 1}),
    "fused slices": (3, 2, 14, {"slices": CAUSAL, "slice_gradient_bytes": 2, "split_backward": False}),
    "given": (2, 4, 12, {"microbatch_factors": [{"time": 1, "bytes": 2}, {"time": 3}, {}, {"time": 2}]}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_windows_reach_what_cp_sat_proves(name: str) -> None:
    devices, microbatches, budget, fields = FAMILIES[name]
    problem = unequal(devices, microbatches, budget, **fields)
    optimum = solve(problem, "cp-sat", Limits(120, workers=1))
    assert optimum.status == "optimal"
    floor = serial_orders(problem)
    assert floor is not None
    orders = with_split_backwards(problem, floor)
    start = Solution(orders, simulate(problem, orders).value_us, optimum.bound_us)  # where it ends
    answer = lns_search(problem, Limits(deterministic_limit=5.0, workers=1), start, lambda _: None)
    assert answer.orders is not None
    assert build_schedule(problem, answer.orders, 0.0, "windows", 0.0).value_us == optimum.value_us


def test_a_free_order_stays_that_of_the_start() -> None:
    """Answers name microbatches as the problem does, in the order that the start has."""
    factors, offload = times(1, 3, 2, 1, 5), {"bytes": 4, "offload_us": 1, "reload_us": 1}
    problem = unequal(3, 5, 12, microbatch_factors=factors, microbatch_order="free", offload=offload)
    chosen = [4, 1, 0, 3, 2]
    floor = serial_orders(in_order(problem, chosen))
    assert floor is not None
    orders = with_own_numbers(problem, floor, chosen)
    assert with_numbers_in_order(problem, orders) == floor
    start = Solution(orders, simulate(problem, orders).value_us, 0.0)
    seen: list[Solution] = []
    answer = lns_search(problem, Limits(deterministic_limit=0.3, workers=1), start, seen.append)
    assert seen
    for better in seen:
        assert better.orders is not None
        schedule = build_schedule(problem, better.orders, 0.0, "windows", 0.0)
        assert (schedule.value_us, schedule.microbatch_order) == (better.value_us, chosen)
    assert answer.value_us < start.value_us
