"""W of like stages in the order of their B: the same times, the same memory."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.memory import curve, device_effect
from optpipe.orders import Op
from optpipe.problem import Problem
from solver.exact.weight_order import count_like_pairs, in_weight_order, like_pairs, like_weights
from tests.problems import problems, uniform
from tests.random_plans import random_plan


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


@settings(deadline=None, max_examples=100)
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
