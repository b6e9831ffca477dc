"""No schedule does less work before an op, or has less left after it, than memory is said to rule out."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from instances import uniform
from optpipe.costs import Effect, device_effect
from optpipe.memory import curve
from optpipe.ops import Op
from optpipe.problem import Problem
from solver.exact.rules import count_like_pairs, in_weight_order, least_work_around, like_pairs, like_weights
from tests.problems import problems
from tests.random_plans import Planned, random_plan
from tests.sample import examples


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


@settings(max_examples=examples(100))
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


def test_pairs_are_counted_without_making_them() -> None:
    problem = uniform(3, 4, v_shape=True)
    assert count_like_pairs(problem) == len(list(like_pairs(problem))) == 3 * 4**2


def test_stages_whose_weights_differ_are_not_alike() -> None:
    data = uniform(2, 2, v_shape=True).to_data()
    assert list(like_weights(Problem.from_data(data))) == [[0, 3], [1, 2]]
    data["stages"][3]["backward_weight_us"] = 11
    data["stages"][2]["workspace_bytes"] = {"W": 1}
    assert list(like_weights(Problem.from_data(data))) == [[0], [3], [1], [2]]
    assert count_like_pairs(Problem.from_data(data)) == 0


@settings(max_examples=examples(100))
@given(problems(), st.booleans(), st.randoms(use_true_random=False))
def test_sorting_keeps_rules_and_memory(problem: Problem, alike: bool, rng: Random) -> None:
    if alike:
        same = {"backward_weight_us": 3, "backward_weight_bytes": 2, "workspace_bytes": {"W": 1}}
        stages = [stage | same for stage in problem.to_data()["stages"]]
        problem = Problem.from_data(problem.to_data() | {"stages": stages})
    plan = {op: times for op, times in random_plan(problem, rng).items() if op.kind != "BW"}
    starts = {op: start for op, (start, _) in plan.items()}
    split = {op: start for op, start in starts.items() if Op("W", *op[1:]) in starts}
    ordered = in_weight_order(problem, split)
    assert sorted(ordered) == sorted(split)
    for op, start in ordered.items():
        if op.kind == "W":
            backward = Op("B", *op[1:])
            assert start >= split[backward] + problem.stages[op.stage].backward_input_us
    for backwards, weights in like_pairs(problem):
        if all(op in split for op in (*backwards, *weights)):
            b, c = (ordered[op] for op in backwards)
            v, w = (ordered[op] for op in weights)
            assert b == c or v == w or (b < c) == (v < w)
    for d in range(len(problem.devices)):
        assert memory(problem, ordered, d) == memory(problem, split, d)


def memory(problem: Problem, starts: dict[Op, float], device: int) -> tuple[list[float], list[int]]:
    stages = problem.stages
    events = [
        (start, start + stages[op.stage].duration_us(op.kind), device_effect(stages[op.stage], op.kind))
        for op, start in starts.items()
        if stages[op.stage].device == device
    ]
    levels = curve(events)
    return levels.times_us.tolist(), levels.bytes.tolist()
