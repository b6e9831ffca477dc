"""Bounds from states with copies: never above an optimum, and often one where states without copies say less."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from random import Random
from typing import Any

import pytest

from instances.four_by_eight import four_by_eight
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.exact import copy_states
from solver.exact.copy_states import CopyDolls, PartTimes, copy_state_bound, copy_state_proof
from solver.exact.cp_sat.model import Options, solve_cp_sat
from solver.limits import Limits
from solver.serial import serial_orders
from solver.solution import Solution
from tests.recomputing import recomputing
from tests.unequal import unequal


def bound_us(problem: Problem, work: float = 1.0, workers: int = 1) -> float:
    """The bound with so many units of work."""
    start = Solution(bound_us=lower_bound_us(problem))
    limits = Limits(workers=workers, deterministic_limit=work)
    return copy_state_bound(problem, limits, start, lambda _: None).bound_us


def random_pipeline(rng: Random) -> Problem:
    """Up to three devices in any placement with little memory, from which most activations may leave."""
    p, times = rng.randint(1, 3), rng.choice([(0, 1, 2, 3), (1, 2), (0.5, 1.25)])
    placements = [[*range(p), *reversed(range(p))], [*range(p)] * 2, [*range(p)], [rng.randrange(p) for _ in range(4)]]
    devices, equal, splits = rng.choice(placements), rng.random() < 0.5, rng.choice([1.0, 1.0, 0.8])
    copies = rng.choice([(0, 1, 2), (1, 2, 4), (0.5, 2.5)])

    def stage() -> dict[str, Any]:
        activation = rng.randint(1, 4)
        copy = {"bytes": rng.randint(1, activation), **{k: rng.choice(copies) for k in ("offload_us", "reload_us")}}
        return {
            **{kind: rng.choice(times) for kind in ("forward_us", "backward_input_us", "backward_weight_us")},
            "activation_bytes": activation,
            "backward_weight_bytes": rng.randint(0, activation + (rng.random() < 0.2)),
            "workspace_bytes": {kind: rng.choice([0, 0, 0, 1]) for kind in ("F", "B", "W", "BW")},
            "offload": rng.choice([None, copy, copy, copy]),
            "split_backward": rng.random() < splits,
        }

    same = stage()
    stages = [(same if equal else stage()) | {"device": device} for device in devices]
    largest = [max((one["activation_bytes"] for one in stages if one["device"] == d), default=1) for d in range(p)]
    shared = rng.choice([[], [list(range(p))]])
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": rng.randint(2, 5),
            "objective": rng.choice(["makespan", "makespan", "device_span"]),
            "transfer_us": rng.choice([0, 1, {"forward": 1, "backward": 2}]),
            "devices": [{"memory_bytes": size + rng.randint(0, 4)} for size in largest],
            "stages": stages,
            "copy_channels": {"duplex": rng.random() < 0.5, "shared_by": shared},
        }
    )


def test_no_schedule_is_below() -> None:
    met = more = 0
    for seed in range(16):
        problem = random_pipeline(Random(seed))
        orders = serial_orders(problem)
        if orders is None or not any(stage.offload for stage in problem.stages):
            continue
        start = Solution(orders, simulate(problem, orders).value_us, 0.0)
        limits = Limits(workers=1, deterministic_limit=0.05)
        best = solve_cp_sat(problem, limits, start, lambda _: None, Options(climb=False))
        bound = bound_us(problem, work=0.3)
        assert bound <= best.value_us + 1e-9, seed
        met += bound >= best.value_us - 1e-9
        more += bound > lower_bound_us(problem) + 1e-9
    assert met >= 3
    assert more >= 1


def pipeline(devices: list[int], budgets: list[int], copy_us: tuple[float, float], **more: Any) -> Problem:
    """Stages of 1.25 us F, and B and W of 0.5 us, whose activations of one byte may leave; one channel for all."""
    stage = {"forward_us": 1.25, "backward_input_us": 0.5, "backward_weight_us": 0.5, "backward_weight_bytes": 0}
    copy = {"bytes": 1, "offload_us": copy_us[0], "reload_us": copy_us[1]}
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": 3,
            "transfer_us": 1,
            "devices": [{"memory_bytes": budget} for budget in budgets],
            "stages": [stage | {"device": d, "activation_bytes": 1, "offload": copy} for d in devices],
            "copy_channels": {"duplex": False, "shared_by": [[*range(len(budgets))]]},
        }
        | more
    )


def test_what_leaves_was_there_in_time() -> None:
    """The third F of stage 0 starts as the second ends: the first activation has left by then, the second could not.

    CP-SAT has a schedule of 21 us; if only the latest could leave there would be none below 22.25.
    """
    assert bound_us(pipeline([0, 1, 0, 0], [2, 4], (1, 0))) == 21


def test_says_more_of_a_problem_of_the_family() -> None:
    """Chains and windows of `interleaved2-14` say 5136."""
    reported: list[float] = []
    problem = four_by_eight(14)
    start = Solution(bound_us=lower_bound_us(problem))
    limits = Limits(workers=1, deterministic_limit=1.0)
    answer = copy_state_bound(problem, limits, start, lambda solution: reported.append(solution.bound_us))
    assert 5700 < answer.bound_us <= 6624
    assert reported == sorted(reported)
    assert reported[-1] == answer.bound_us


@pytest.mark.parametrize(("seed", "optimum_us"), [(28, 7680.0), (37, 6816.0)])
def test_two_devices_prove_an_optimum_and_nothing_of_a_worse_value(seed: int, optimum_us: float) -> None:
    problem = four_by_eight(seed)
    orders, before_us = serial_orders(problem), lower_bound_us(problem)
    start = Solution(orders, optimum_us, before_us)
    answer = copy_state_proof(problem, Limits(workers=1), start, lambda _: None)
    assert answer == replace(start, bound_us=optimum_us)
    worse = replace(start, value_us=1.1 * optimum_us)
    assert copy_state_proof(problem, Limits(workers=1, deterministic_limit=0.2), worse, lambda _: None) == worse


def test_without_a_schedule_there_is_nothing_to_prove() -> None:
    start = Solution(bound_us=5136.0)
    assert copy_state_proof(four_by_eight(14), Limits(workers=1), start, lambda _: None) is start


def test_threads_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_states, "LEAST_SHARE", 2)
    problem = pipeline([0, 1, 0], [1, 3], (2, 2), microbatches=3)
    assert bound_us(problem, workers=3) == bound_us(problem)


def test_gives_up_where_too_many_states_are_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_states.CopyDolls, "most_states", 2)
    problem = four_by_eight(14)
    assert lower_bound_us(problem) <= bound_us(problem) < 5700


def test_proves_nothing_from_some_of_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices cannot prove 5220 us, however few of the states found are looked at."""
    problem = four_by_eight(91)
    for most in (10, 30, 100, 300):
        monkeypatch.setattr(copy_states.CopyDolls, "most_found", most)
        dolls = CopyDolls(problem, Limits(workers=1), (0, 1), PartTimes(problem))
        assert list(dolls.question(ceil(5220 / dolls.unit_us) - 1)) == []
        assert not dolls.is_reached


def test_leaves_alone_what_it_has_no_states_for() -> None:
    """Modes, unequal microbatches, and more stages than a number has bits."""
    long = pipeline([d // 32 for d in range(64)], [32, 32], (1, 1), microbatches=8)
    for problem in (recomputing(2, 4), unequal(2, 4, slices={"count": 2}), long):
        assert bound_us(problem) == lower_bound_us(problem)


def test_stops_when_it_is_told_to() -> None:
    limits = Limits(workers=1)
    limits.cancel.request()
    start = Solution(None, 6678.0, 5136.0)
    assert copy_state_bound(four_by_eight(14), limits, start, lambda _: None) == start
