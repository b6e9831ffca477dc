"""Whole forwards before the first backwards of all devices: by hand, on instances, and never above an optimum."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from instances import instance, uniform
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us, warmup_cooldown_bounds_us
from solver.bounds.whole_forwards import MOST_STAGES, forwards_before_first_backward, whole_forwards_bound_us
from solver.warm_starts import zb_auto_of_whole_forwards
from tests.sample import some
from tests.solutions import best_found

LARGE = ["zb-1.5b-p8-m32-mem2", "zb-6.2b-p8-m64-mem2", "zb-14.6b-p16-m48-mem2", "zb-28.3b-p32-m96-mem2"]


def test_each_device_waits_for_the_next_or_runs_a_forward_more() -> None:
    """F and B of 10 us, transfers of 1 us: from device to device a first B comes later by two forwards and 2 us.

    After 1, 3, 5 and 7 forwards of the four devices and 0, 2, 4, 6 us; or after 1, 3, 6, 8 and 0, 2, 0, 2 us.
    """
    for room, idle_us, forwards in [(7, 6, [7, 5, 3, 1]), (8, 2, [8, 6, 3, 1])]:
        problem = uniform(4, 16, budget=2 * room, objective="device_span", backward_weight_bytes=0)
        assert whole_forwards_bound_us(problem) == 16 * 30 + idle_us
        assert forwards_before_first_backward(problem) == forwards
    assert max(warmup_cooldown_bounds_us(problem)) == 16 * 30
    assert lower_bound_us(problem) == 16 * 30 + 2


def test_no_more_than_what_is_known_where_any_wait_is_allowed() -> None:
    problem = uniform(4, 8, budget=8, objective="device_span")
    known_us = lower_bound_us(problem)
    assert known_us >= 8 * 30 + 10
    assert whole_forwards_bound_us(problem, known_us) == known_us
    many = uniform(MOST_STAGES + 1, 1)
    assert whole_forwards_bound_us(many, 7.0) == 7.0
    assert forwards_before_first_backward(many) == []


@pytest.mark.parametrize("name", LARGE)
def test_twice_the_memory_of_1f1b_is_proved(name: str) -> None:
    """The measured profiles: no device's own windows say more than its work, unless memory is a little short."""
    problem = instance(name)
    assert lower_bound_us(problem) == simulate(problem, zb_auto_of_whole_forwards(problem)).value_us


def random_pipeline(rng: Random) -> Problem:
    """Three or four devices, mostly alike, with about as much memory as their warm-ups need."""
    p, chunks = rng.randint(3, 4), rng.choice([1, 1, 1, 2])
    devices = [*range(p), *(reversed(range(p)) if rng.random() < 0.7 else range(p))][: p * chunks]
    alike = rng.random() < 0.9
    spans = {"forward_us": (4, 6), "backward_input_us": (3, 6), "backward_weight_us": (4, 6)}
    times = {kind: [rng.randint(*span) for _ in range(p)] for kind, span in spans.items()}

    def stage(device: int) -> dict[str, Any]:
        copy = {"bytes": rng.choice([1, 2]), "offload_us": rng.randint(3, 12), "reload_us": rng.randint(0, 6)}
        return {kind: times_us[0 if alike else device] for kind, times_us in times.items()} | {
            "device": device,
            "activation_bytes": 2,
            "backward_weight_bytes": rng.randint(0, 2),
            "offload": copy if rng.random() < 0.1 else None,
        }

    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": rng.randint(2 * p, 2 * p + 1) // chunks,
            "objective": "device_span" if rng.random() < 0.8 else "makespan",
            "transfer_us": rng.choice([1, 2]),
            "devices": [{"memory_bytes": rng.choice([None, 2 * rng.randint(2 * p - 1, 2 * p + 1)])} for _ in range(p)],
            "stages": [stage(device) for device in devices],
        }
    )


SAYS_MORE = [14, 26, 42, 44, 52, 65, 71, 72, 84, 90, 96, 101, 102, 105, 115, 122, 125, 130, 132, 133, 149, 153, 163]
"""The first seeds of problems on which this says more than the devices' own windows."""


@pytest.mark.parametrize("seed", some(SAYS_MORE))
def test_no_schedule_is_below(seed: int) -> None:
    problem = random_pipeline(Random(seed))
    best, bound_us = best_found(problem, 0.2), whole_forwards_bound_us(problem)
    assert best is not None
    assert max(warmup_cooldown_bounds_us(problem)) + 1e-6 < bound_us <= best.value_us + 1e-9
