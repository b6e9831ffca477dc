"""Stages with F alone, read from the task graph: what is found is valid, and no bound is above an optimum."""

from __future__ import annotations

from random import Random

import pytest

from optpipe.problem import Problem
from optpipe.task_graph import lower
from solver.bounds.lower_bound import device_bounds_us, lower_bound_us
from solver.build import build_schedule
from solver.exact.cp_sat.model import solve_cp_sat
from solver.exact.relaxation import proof_by_parts
from solver.limits import Limits
from solver.lists.memory import MemoryLists, Rules
from solver.serial import impossible_budgets, known_budgets_bytes, serial_orders
from solver.solution import Solution
from solver.solve import solve
from tests.sample import some

WORK = Limits(float("inf"), workers=1, deterministic_limit=2.0)


def random_frozen(seed: int, *, alike: bool = False) -> Problem:
    """A line or a V of up to three devices, whose first stages have F alone; three microbatches, alike or not."""
    rng = Random(seed)
    devices = rng.randint(2, 3)
    homes = [*range(devices), *(reversed(range(devices)) if rng.random() < 0.5 else ())]
    frozen = rng.randint(1, len(homes) - 1)
    unequal = [{"time": rng.choice([1, 2]), "bytes": rng.choice([1, 0.5])} for _ in range(3)]
    times = ("forward_us", "backward_input_us", "backward_weight_us")
    problem = Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": 3,
            "objective": rng.choice(["makespan", "device_span"]),
            "transfer_us": 1,
            "devices": [{"memory_bytes": None}] * devices,
            "stages": [
                {
                    "device": device,
                    **{name: rng.randint(1, 4) for name in times},
                    "activation_bytes": 4,
                    "backward_weight_bytes": rng.randint(0, 4),
                    "backward": "none" if s < frozen else "full",
                }
                for s, device in enumerate(homes)
            ],
            "microbatch_factors": None if alike else rng.choice([None, unequal]),
            "microbatch_order": rng.choice(["given", "free"]),
        }
    )
    budgets = [{"memory_bytes": known + rng.choice([0, 4, 8])} for known in known_budgets_bytes(problem)]
    return Problem.from_data(problem.to_data() | {"devices": budgets})


@pytest.mark.parametrize("seed", some(range(20)))
def test_orders_are_valid_and_no_bound_is_above_the_optimum(seed: int) -> None:
    problem = random_frozen(seed)
    assert not impossible_budgets(problem)
    orders = serial_orders(problem)
    assert orders is not None
    build_schedule(problem, orders, 0.0, "serial", 0.0)  # verifies it
    found = solve_cp_sat(problem, WORK, Solution(None, float("inf"), 0.0), lambda _: None)
    assert found.orders is not None
    value_us = build_schedule(problem, found.orders, found.bound_us, "cp-sat", 0.0).value_us
    assert max(lower_bound_us(problem), *device_bounds_us(problem)) <= value_us + 1e-9
    if found.bound_us < value_us:
        return
    parts = proof_by_parts(problem, WORK, Solution(found.orders, value_us, 0.0), lambda _: None)
    assert parts.value_us == pytest.approx(value_us)
    assert parts.bound_us <= value_us + 1e-9
    other = solve(problem, "cp-sat", WORK)  # with backwards that cost nothing
    assert other.bound_us <= value_us + 1e-9
    if problem.objective == "makespan" and other.gap == 0:
        assert other.value_us == pytest.approx(value_us)


@pytest.mark.parametrize("objective", ["makespan", "device_span"])
def test_no_chain_of_blocks_goes_back_through_stages_without_a_backward(objective: str) -> None:
    """One microbatch alone, one op after the other: 3 us of F, a transfer each way along the V, and 4 us of BW."""
    times = {"forward_us": 1, "backward_input_us": 2, "backward_weight_us": 2}
    stage = times | {"activation_bytes": 1, "backward_weight_bytes": 1}
    problem = Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": 1,
            "objective": objective,
            "transfer_us": 5,
            "devices": [{"memory_bytes": None}] * 2,
            "stages": [
                stage | {"device": 0, "backward": "none"},
                stage | {"device": 1, "backward": "none"},
                stage | {"device": 0},
            ],
            "overlaps": [{"forward_stage": 2, "backward_stage": 2, "us": 4}],
        }
    )
    assert lower_bound_us(problem) <= solve(problem, "auto", WORK).value_us == 17


@pytest.mark.parametrize("seed", some(range(40)))
def test_lists_are_valid_and_end_as_planned(seed: int) -> None:
    problem = random_frozen(seed, alike=True)
    lists = MemoryLists(problem, [0] * len(problem.stages), [0] * len(problem.stages))
    for rules in (Rules(1, 0), Rules(3, 1), Rules(2, 1, stock=1.2, hold=0.5)):
        orders = lists.orders(rules)
        assert orders is not None
        schedule = build_schedule(problem, orders, 0.0, "lists", 0.0)
        if problem.objective == "makespan":
            assert schedule.value_us <= lists.makespan_us(rules) + 1e-9


def test_chains_do_each_duty_of_a_stage_once() -> None:
    stage = {"device": 0, "forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1, "activation_bytes": 4,
             "backward_weight_bytes": 2}  # fmt: skip
    modes = [{"name": "full", "kept_bytes": 1, "recompute_us": 1, "segment_bytes": 2}]
    copied = {"bytes": 2, "offload_us": 1, "reload_us": 1}
    stages = [
        {**stage, "backward": "none"},
        {**stage, "split_backward": False, "modes": modes},
        {**stage, "offload": copied},
    ]
    data = {"format": "optpipe.problem/1", "microbatches": 1, "devices": [{"memory_bytes": None}], "stages": stages}
    graph = lower(Problem.from_data(data))
    assert graph.chains(0, 0) == [("F",)]
    assert graph.chains(1, 0) == [("F", "BW")]
    assert graph.chains(1, 1) == [("F", "C", "BW"), ("F", "CBW")]
    assert graph.chains(2, 1) == [("F", "O", "R", "B", "W"), ("F", "O", "R", "BW")]
    assert graph.trained.tolist() == [False, True, True]
    assert graph.has_modes.tolist() == [False, True, False]
