"""Patterns with activation modes: valid, better than one choice a stage, and as far from the bound with any number."""

from __future__ import annotations

from random import Random

import pytest

from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.build import build_schedule
from solver.by_stage import choices
from solver.limits import Limits
from solver.search.modulo.modes import modulo_with_modes
from solver.serial import serial_orders
from solver.solution import Solution
from tests.recomputing import random_pipeline, recomputing

LIGHT = {"name": "light", "kept_bytes": 1, "recompute_us": 1, "forward_workspace_bytes": 0}


def found(problem: Problem, work: float) -> Schedule:
    """Verified schedule that so much work finds from the floor."""
    orders = serial_orders(problem)
    assert orders is not None
    start = Solution(orders, simulate(problem, orders).value_us)
    limits = Limits(float("inf"), workers=1, deterministic_limit=work)
    answer = modulo_with_modes(problem, limits, start, lambda _: None)
    assert answer.orders is not None
    schedule = build_schedule(problem, answer.orders, 0.0, "pattern", 0.0)
    assert schedule.value_us == answer.value_us <= start.value_us
    return schedule


def test_it_is_better_than_one_choice_a_stage() -> None:
    """At half the memory of 1F1B that is 34; the optimum is 31."""
    schedule = found(recomputing(4, 8, [LIGHT], 20, backward_weight_bytes=10), 1.0)
    assert schedule.value_us <= 33
    recomputed = [sum(op.op == "C" for op in device.compute) for device in schedule.devices]
    assert 0 < sum(recomputed) < 4 * 8


@pytest.mark.parametrize("microbatches", [64, 256, 1024])
def test_it_is_as_near_to_the_bound_with_any_number_of_microbatches(microbatches: int) -> None:
    """At three eighths of the memory of 1F1B."""
    problem = recomputing(4, microbatches, [LIGHT], 15, backward_weight_bytes=10)
    assert found(problem, 1.0).value_us <= 1.12 * lower_bound_us(problem)


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_it_keeps_every_rule_and_budget(first: int) -> None:
    for seed in range(first, first + 10):
        problem = random_pipeline(Random(seed))
        if all(stage.split_backward for stage in problem.stages):
            found(problem, 0.05)


def test_a_plan_takes_a_share_of_each_recomputation() -> None:
    by_stage = next(by_stage for by_stage in choices(recomputing(2, 2, [LIGHT])) if by_stage.chosen[0].ahead)
    assert [stage.backward_input_us for stage in by_stage.plain.stages] == [2, 2]
    assert [stage.backward_input_us for stage in by_stage.plain_at([0.25, 0.5]).stages] == [1.25, 1.5]
