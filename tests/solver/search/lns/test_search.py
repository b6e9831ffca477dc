"""Windows: never worse, always within the budgets, the same in every run, and down to known optima from weak starts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings

from instances import HALF, uniform
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.build import build_schedule, within_budgets
from solver.limits import Limits
from solver.published.one_stage import one_f_one_b
from solver.published.zb_auto import zb_auto
from solver.search.lns.neighbourhood import with_split_backwards
from solver.search.lns.search import LAST_SHARE, NEAR, _Search, lns_search
from solver.serial import serial_orders
from solver.solution import Solution
from tests.problems import KNOWN_OPTIMA, problems
from tests.sample import examples


def start_at(problem: Problem, orders: Orders) -> Solution:
    value = simulate(problem, orders).value_us
    return Solution(orders, value, lower_bound_us(problem))


def improved(problem: Problem, orders: Orders, work: float, seed: int = 0) -> tuple[Solution, list[Solution]]:
    seen: list[Solution] = []
    limits = Limits(600, workers=1, seed=seed, deterministic_limit=work)
    return lns_search(problem, limits, start_at(problem, orders), seen.append), seen


@settings(max_examples=examples(40))
@given(problems())
def test_every_answer_is_valid_and_better_than_the_one_before(problem: Problem) -> None:
    orders = serial_orders(problem)
    assume(orders is not None)
    assert orders is not None
    assume(within_budgets(problem, orders, simulate(problem, orders)))
    start = start_at(problem, orders)
    answer, seen = improved(problem, orders, work=0.05)
    values = [start.value_us, *(one.value_us for one in seen)]
    assert all(later < earlier for earlier, later in pairwise(values))
    assert answer.value_us == values[-1]
    for one in seen:
        assert one.orders is not None
        assert build_schedule(problem, one.orders, one.bound_us, "windows", 0.0).value_us == one.value_us


def test_a_backward_without_length_stays_in_front_of_its_w() -> None:
    """BW starts at 3.6 us (0.5 + 3 + 0.1), and 4.6 - 1 is less than that in floats."""
    sizes = {"activation_bytes": 0, "backward_weight_bytes": 0, "backward_weight_us": 1}
    stages = [
        {"device": 0, "forward_us": 0.5, "backward_input_us": 1, **sizes},
        {"device": 1, "forward_us": 0.1, "backward_input_us": 0, **sizes},
    ]
    fields = {"microbatches": 1, "objective": "makespan", "devices": [{"memory_bytes": None}] * 2, "transfer_us": 3}
    problem = Problem.from_data({"format": "optpipe.problem/1", "stages": stages, **fields})
    fused = Orders([DeviceOrders([Op("F", 0, 0), Op("BW", 0, 0)]), DeviceOrders([Op("F", 1, 0), Op("BW", 1, 0)])])
    split = with_split_backwards(problem, fused)
    assert [op.kind for op in split.devices[1].compute] == ["F", "B", "W"]


@pytest.mark.parametrize("name", ["makespan", "device_span", pytest.param("offload", marks=pytest.mark.slow)])
def test_reaches_known_optima_from_one_microbatch_at_a_time(name: str) -> None:
    problem, value_us = KNOWN_OPTIMA[name]
    orders = serial_orders(problem)
    assert orders is not None
    start = replace(start_at(problem, orders), bound_us=value_us)
    limits = Limits(600, workers=1, deterministic_limit=4.0)
    assert lns_search(problem, limits, start, print).value_us == value_us


def test_moves_activations_to_the_host_where_that_helps() -> None:
    problem = uniform(4, 8, budget=4, offload=HALF)
    orders = zb_auto(uniform(4, 8, budget=4))
    answer, _ = improved(problem, orders, work=0.25)
    assert answer.orders is not None
    assert answer.value_us < simulate(problem, orders).value_us
    assert any(device.offload for device in answer.orders.devices)


def test_the_same_answers_in_every_run() -> None:
    problem = uniform(4, 12, budget=6)
    orders = zb_auto(problem)
    first, again = (improved(problem, orders, work=0.1, seed=7) for _ in range(2))
    assert first == again
    assert first[1]


def test_splits_fused_backwards() -> None:
    problem = uniform(3, 6, budget=6)
    answer, _ = improved(problem, one_f_one_b(problem), work=1.0)
    assert answer.orders is not None
    assert {op.kind for op in answer.orders.ops()} == {"F", "B", "W"}


def test_splits_a_fused_backward_that_overtook_a_weight_pass() -> None:
    problem = uniform(1, 2)
    orders = Orders.of_compute([[Op.parse(name) for name in ["F0.0", "F0.1", "B0.0", "BW0.1", "W0.0"]]])
    answer = lns_search(problem, Limits(600, workers=1, deterministic_limit=0.1), start_at(problem, orders), print)
    assert answer.value_us == answer.bound_us == 60


def test_keeps_fused_backwards_where_only_they_fit() -> None:
    data = uniform(2, 3, budget=4).to_data()
    for stage in data["stages"]:
        stage["workspace_bytes"] = {"B": 3}
    problem = Problem.from_data(data)
    orders = one_f_one_b(problem)
    answer, seen = improved(problem, orders, work=1.0)
    assert (answer.orders, seen) == (orders, [])


def test_without_a_start_there_is_nothing_to_improve() -> None:
    def never(answer: Solution) -> Any:
        raise AssertionError(answer)

    answer = lns_search(uniform(2, 2), Limits(1), Solution(), never)
    assert answer == Solution()


def test_copies_that_would_outlast_every_schedule_do_no_harm() -> None:
    """In ticks, of which a transfer is a whole number, they exceed 64 bits."""
    endless = {"bytes": 1, "offload_us": 1e12, "reload_us": 1e12}
    problem = uniform(2, 4, budget=4, transfer_us=0.1234567, offload=endless)
    orders = serial_orders(problem)
    assert orders is not None
    answer, seen = improved(problem, orders, work=0.1)
    assert seen
    assert answer.value_us < simulate(problem, orders).value_us


def with_late_op(microbatches: int, at: int) -> tuple[Problem, Orders]:
    """The optimum of four devices, but device 0 runs the compute op `at` later than the one after it."""
    problem = uniform(4, microbatches, budget=8, objective="device_span")
    first, *others = zb_auto(problem).devices
    compute = [*first.compute]
    compute[at], compute[at + 1] = compute[at + 1], compute[at]
    return problem, Orders([replace(first, compute=compute), *others])


def test_what_little_is_missing_is_asked_for_at_the_end() -> None:
    problem, orders = with_late_op(100, -12)
    seen: list[Solution] = []
    start = start_at(problem, orders)
    assert start.bound_us < start.value_us <= (1 + NEAR) * start.bound_us
    _Search(problem, Limits(600, workers=1, deterministic_limit=4.0), start, seen.append)._ask_for_bound()
    assert [answer.value_us for answer in seen] == [start.bound_us]
    assert seen[0].orders is not None
    assert build_schedule(problem, seen[0].orders, start.bound_us, "windows", 0.0).status == "optimal"


def test_questions_at_the_end_leave_work_for_windows() -> None:
    """Ops that were late at the beginning are not made up for at the end."""
    problem, orders = with_late_op(100, 21)
    start = start_at(problem, orders)
    assert start.bound_us < start.value_us <= (1 + NEAR) * start.bound_us
    search = _Search(problem, Limits(600, workers=1, deterministic_limit=1.0), start, print)
    search._ask_for_bound()
    assert search.best is start
    assert search.work_left is not None
    assert search.work_left > 0.8 * (1 - LAST_SHARE)


def test_nothing_is_asked_where_more_is_missing() -> None:
    problem, orders = with_late_op(40, -12)
    start = start_at(problem, orders)
    assert start.value_us > (1 + NEAR) * start.bound_us
    search = _Search(problem, Limits(600, workers=1, deterministic_limit=1.0), start, print)
    search._ask_for_bound()
    assert search.work_left == 1.0
