"""No schedule does less work before an op, or has less left after it, than memory is said to rule out."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from optpipe.memory import Effect, curve, device_effect
from optpipe.orders import Op
from optpipe.problem import Problem
from solver.exact.progress import least_work_around
from tests.problems import problems, uniform
from tests.random_plans import Planned, random_plan


def within_its_peaks(problem: Problem, plan: Planned) -> Problem:
    """The problem with each device's budget at what the plan needs; what B leaves counts from its start."""
    devices = []
    for d in range(len(problem.devices)):
        events = [
            (*times, from_the_start(device_effect(problem.stages[op.stage], op.kind)))
            for op, times in plan.items()
            if problem.stages[op.stage].device == d
        ]
        devices.append({"memory_bytes": curve(events).peak_bytes})
    return Problem.from_data(problem.to_data() | {"devices": devices})


def from_the_start(effect: Effect) -> Effect:
    taken = max(effect.at_start, effect.at_start + effect.at_end)
    return Effect(taken, effect.at_start + effect.at_end - taken)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(problems(max_microbatches=4), st.randoms(use_true_random=False))
def test_random_schedules_are_not_ruled_out(problem: Problem, rng: Random) -> None:
    data = problem.to_data()
    for stage in data["stages"]:  # what happens at one instant has no order in a curve
        stage |= {kind: stage[kind] + 1 for kind in ("forward_us", "backward_input_us", "backward_weight_us")}
    problem = Problem.from_data(data)
    plan = random_plan(problem, rng)
    assume(all(op.kind != "BW" for op in plan))
    problem = within_its_peaks(problem, plan)
    stages = problem.stages
    for op, before, after in least_work_around(problem, lambda kind, s: stages[s].duration_us(kind)):
        own = [
            (times, other)
            for other, times in plan.items()
            if other.kind in "FBW" and stages[other.stage].device == stages[op.stage].device
        ]
        earlier = [other for times, other in own if times[1] <= plan[op][0]]
        done = sum(stages[other.stage].duration_us(other.kind) for other in earlier)
        work = sum(stages[other.stage].duration_us(other.kind) for _, other in own)
        assert before <= done + 1e-6
        assert after <= work - done + 1e-6


@pytest.mark.parametrize(
    ("op", "before_us", "after_us"),
    [
        (Op("F", 0, 2), 40, 60),
        (Op("B", 0, 0), 10, 100),
        (Op("B", 1, 3), 90, 20),
    ],
)
def test_what_room_for_two_microbatches_says(op: Op, before_us: float, after_us: float) -> None:
    """A third F needs B and W of the first before it, and leaves those of two microbatches at the least.

    At most two F come before the first B. The last B finds all F done and, beside its own activation, one W put off.
    """
    problem = uniform(2, 4, budget=4, backward_weight_bytes=2)
    found = {around.op: around for around in least_work_around(problem, lambda kind, s: 10)}
    assert found[op] == (op, before_us, after_us)


def test_without_budgets_nothing_is_said() -> None:
    assert list(least_work_around(uniform(2, 2), lambda kind, s: 1)) == []


def test_what_never_fits_is_impossible() -> None:
    problem = uniform(1, 2, budget=1)
    assert {around.before for around in least_work_around(problem, lambda kind, s: 10)} == {inf}
