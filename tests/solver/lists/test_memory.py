"""List schedules in which memory decides how activations are held: valid in every budget, no more than it asks for."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from benchmarks.many_devices import offloading_or_recomputing
from instances import HALF, WHOLE, instance, uniform
from solver.bounds import lower_bound_us
from solver.build import build_schedule
from solver.limits import Limits
from solver.lists.memory import ON_ITS_WAY, WHEN_IDLE, WITH_GRADIENT, MemoryLists, Rules
from solver.search.in_flight import AGAIN, RESERVE, in_flight_search
from solver.solution import Solution
from tests.recomputing import FULL, LEAVES, random_pipeline, recomputing
from tests.sample import some
from tests.solutions import schedule_found

LIGHT = {"name": "light", "kept_bytes": 1, "recompute_us": 1, "forward_workspace_bytes": 0}
WORK = Limits(float("inf"), workers=1, deterministic_limit=10.0)


@pytest.mark.parametrize("mode", some([LIGHT, FULL]))
def test_every_choice_is_valid_in_every_budget(mode: dict[str, object]) -> None:
    for budget, in_flight, late, change in product((12, 15, 23, 40), (1, 3, 9), (0, 3), [*AGAIN, *RESERVE]):
        problem = recomputing(4, 10, [mode], budget, backward_weight_bytes=4)
        orders = MemoryLists(problem, [1] * 4, [0] * 4).orders(Rules(in_flight, late, **change))
        if orders is None:
            assert budget == 12 or in_flight > 1
            continue
        build_schedule(problem, orders, 0.0, "lists", 0.0)  # verifies it


COPIED = [
    uniform(4, 10, budget=5, offload=HALF),
    uniform(4, 10, budget=7, offload=HALF, copy_channels={"duplex": False}),
    uniform(4, 10, budget=4, offload=WHOLE | {"reload_us": 35}, transfer_us=4),
    uniform(3, 8, budget=9, offload=HALF, v_shape=True),
    uniform(3, 8, budget=9, offload=WHOLE | {"offload_us": 25}, v_shape=True, copy_channels={"duplex": False}),
    uniform(4, 10, budget=5, offload=HALF, copy_channels={"shared_by": [[0, 3], [1, 2]]}),
    uniform(3, 8, budget=9, offload=WHOLE, v_shape=True, copy_channels={"duplex": False, "shared_by": [[0, 2]]}),
]


@pytest.mark.parametrize("number", some(range(len(COPIED))))
def test_with_copies_every_choice_is_valid_and_ends_as_planned(number: int) -> None:
    problem = COPIED[number]
    lists = MemoryLists(
        problem, [0] * len(problem.stages), [int(stage.offload is not None) for stage in problem.stages]
    )
    copies = 0
    early = product((1, 3, 9), (0, 3), (0, 1.5), (ON_ITS_WAY,), (0,), (0, 1, 3))
    stocked = (Rules(*numbers, stock=stock) for *numbers, stock in product((3, 9), (0, 3), (0, 1.5), (0.7, 1.3)))
    for rules in (*(Rules(*numbers) for numbers in early), *stocked):
        orders = lists.orders(rules)
        if orders is None:
            continue
        copies += sum(len(device.offload) for device in orders.devices)
        schedule = build_schedule(problem, orders, 0.0, "lists", 0.0)  # verifies it
        assert schedule.value_us <= lists.makespan_us(rules)
    assert copies


def test_a_stock_of_activations_shortens_the_cool_down() -> None:
    """Sixteen devices with four chunks each, two behind each channel; no schedule is shorter than 102,250 us."""
    problem = instance("d-p16-m32-o1-mo1-b1o4-interleaved4-make-pairs")
    lists = MemoryLists(problem, [0] * 64, [1] * 64)
    without_us, with_us = (
        min(lists.makespan_us(Rules(n, 7, tail, stock=stock)) for n, tail in product((20, 22, 24, 32), (0, 0.125)))
        for stock in (0.0, 1.85)
    )
    assert with_us < 0.96 * without_us


def test_every_way_to_hold_an_activation_is_used_where_memory_is_short() -> None:
    problem = offloading_or_recomputing(8, 24)
    lists = MemoryLists(problem, [2] * 7 + [1], [1] * 7 + [0])
    for rules in (Rules(8, 1, behind=4), Rules(8, 1, tail=1, reserve=3)):
        orders = lists.orders(rules)
        assert orders is not None
        assert orders.modes is not None
        assert {1, 2} <= set(orders.modes[0].tolist())
        build_schedule(problem, orders, 0.0, "lists", 0.0)


def test_what_is_planned_to_be_recomputed_is_spread_evenly() -> None:
    problem = recomputing(4, 40, [LIGHT], 25, backward_weight_bytes=4)
    orders = MemoryLists(problem, [1] * 4, [0] * 4).orders(Rules(4, 1, reserve=1))
    assert orders is not None
    assert orders.modes is not None
    recomputed = orders.modes.sum(axis=1)  # 2.5 of 4 in flight have room: 4 - 2.5 + 1 of 4, each of which saves 0.9
    assert recomputed.tolist() == sorted(recomputed, reverse=True)
    assert abs(recomputed[0] - 40 * 2.5 / (4 * 0.9)) <= 2
    halves = orders.modes.reshape(4, 2, 20).sum(axis=2)
    assert (abs(halves[:, 0] - halves[:, 1]) <= 2).all()


def test_the_first_are_recomputed_and_those_behind_by_a_plan_for_fewer_in_flight() -> None:
    problem = recomputing(4, 40, [LIGHT], 25, backward_weight_bytes=4)
    recomputed = {}
    for planned in (4, 10):
        rules = Rules(10, 1, reserve=1, planned=planned / 4, warm_up=2)
        orders = MemoryLists(problem, [1] * 4, [0] * 4).orders(rules)
        assert orders is not None
        assert orders.modes is not None
        recomputed[planned] = orders.modes
        build_schedule(problem, orders, 0.0, "lists", 0.0)  # verifies it
    assert recomputed[4][0, :8].all()
    assert recomputed[4][1, :6].all()
    by_plan = MemoryLists(problem, [1] * 4, [0] * 4).orders(Rules(4, 1, reserve=1))
    assert by_plan is not None
    assert by_plan.modes is not None
    assert recomputed[4][0, 8:].tolist() == by_plan.modes[0, 8:].tolist()
    assert recomputed[4][0].sum() < recomputed[10][0].sum()


def test_a_warm_up_of_recomputed_microbatches_shortens_schedules_in_little_memory() -> None:
    """207 us without those lists, where the bound is 178."""
    problem = recomputing(12, 48, [LIGHT], 30, backward_weight_bytes=10)
    assert in_flight_search(problem, WORK, Solution(), lambda _: None).value_us <= 203


def test_nothing_is_recomputed_where_memory_has_room() -> None:
    orders = MemoryLists(recomputing(4, 10, [LIGHT], 1000), [1] * 4, [0] * 4).orders(Rules(8, 2, behind=4))
    assert orders is not None
    assert orders.modes is not None
    assert not orders.modes.any()


def test_a_stage_without_such_a_mode_keeps_all() -> None:
    problem = recomputing(2, 6, [LIGHT], 15, backward_weight_bytes=4)
    orders = MemoryLists(problem, [1, 0], [0, 0]).orders(Rules(6, 0, ahead=WITH_GRADIENT))
    assert orders is not None
    assert orders.modes is not None
    assert orders.modes[0].any()
    assert not orders.modes[1].any()
    build_schedule(problem, orders, 0.0, "lists", 0.0)


def test_an_activation_is_made_before_its_gradient_comes_only_where_that_is_allowed() -> None:
    problem = recomputing(4, 10, [FULL], 25, backward_weight_bytes=4)
    ahead = {}
    for moment in (WITH_GRADIENT, ON_ITS_WAY, WHEN_IDLE):
        orders = MemoryLists(problem, [1] * 4, [0] * 4).orders(Rules(6, 1, ahead=moment))
        assert orders is not None
        ahead[moment] = sum(op.kind == "C" for device in orders.devices for op in device.compute)
    assert ahead[WITH_GRADIENT] == 0 < ahead[ON_ITS_WAY]


@pytest.mark.parametrize("first", some(range(0, 20, 2)))
def test_the_search_keeps_every_rule_and_budget(first: int) -> None:
    for seed in range(first, first + 2):
        problem = random_pipeline(Random(seed))
        if all(stage.split_backward for stage in problem.stages):
            schedule_found(in_flight_search, problem, 10.0)


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
    problem = offloading_or_recomputing(4, 32)
    found: list[Solution] = []
    best = in_flight_search(problem, WORK, Solution(), found.append)
    assert found[-1] == best
    assert best.orders is not None
    assert best.orders.modes is not None
    assert best.orders.modes.any()
    assert build_schedule(problem, best.orders, 0.0, "lists", 0.0).value_us == best.value_us
    without = in_flight_search(problem.without_modes(), WORK, Solution(), lambda _: None)
    assert best.value_us <= without.value_us
