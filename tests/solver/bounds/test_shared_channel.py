"""Idle time in the warm-up of devices that share a channel: by hand, and never above an optimum."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from instances import instance, uniform
from optpipe.problem import Problem
from solver.bounds import lower_bound_us, warmup_cooldown_bounds_us
from solver.bounds.shared_channel import shared_channel_bounds_us
from tests.sample import some
from tests.solutions import best_found

SHARED = {"duplex": True, "shared_by": [[0, 1]]}


def test_two_devices_idle_for_what_one_channel_carries() -> None:
    """Four devices, F, B and W of 10 us, memory for one activation of 2 bytes; one leaves every 10 us.

    Windows of 76 and 54 us; from the end of the first F to the start of the last in either are 76 - 20 us, for 56 us of
    F beside those that fit at once: 20 us. So both devices idle for 54 us, and one of them for half of it. A channel
    for each would let both fill their windows.
    """
    offload = {"bytes": 2, "offload_us": 10, "reload_us": 10}
    problem = uniform(4, 8, budget=2, offload=offload, copy_channels=SHARED)
    first, second, *others = shared_channel_bounds_us(problem)
    assert others == [0, 0]  # each has a channel of its own
    idle_us = (10 + 66) + (10 + 44) - 2 * 10 - (76 - 20)
    # Both have 240 us of work, and the second begins 11 us later.
    assert first == second >= 240 + (11 + idle_us) / 2


def test_shared_channels_of_published_instances() -> None:
    """More than half of the gap from the devices' own windows to the best values known, 51,750 and 103,750 us."""
    for name, alone_us, bound_us in [("p8-m16", 50_000, 51_125), ("p16-m32", 100_000, 102_125)]:
        problem = instance(f"d-{name}-o1-mo1-b1o4-interleaved4-make-pairs")
        assert max(warmup_cooldown_bounds_us(problem)) == alone_us
        assert lower_bound_us(problem) == bound_us


def test_nothing_to_say_without_groups_or_budgets_or_with_quick_copies() -> None:
    slow, quick = ({"bytes": 2, "offload_us": us, "reload_us": us} for us in (10, 9))
    assert set(shared_channel_bounds_us(uniform(4, 8, budget=2, offload=slow))) == {0.0}
    unlimited = shared_channel_bounds_us(uniform(4, 8, offload=slow, copy_channels=SHARED))
    assert max(unlimited) <= max(warmup_cooldown_bounds_us(uniform(4, 8)))
    within = uniform(4, 8, budget=2, offload=quick, copy_channels=SHARED)
    assert max(shared_channel_bounds_us(within)) <= max(warmup_cooldown_bounds_us(within))


def random_pipeline(rng: Random) -> Problem:
    """Two or three devices behind one switch, with one or two stages each, and copies slower than F."""
    p, rounds = rng.randint(2, 3), rng.randint(1, 2)
    devices = [*range(p), *(reversed(range(p)) if rng.random() < 0.3 else range(p))][: p * rounds]

    def stage() -> dict[str, Any]:
        copy_us = rng.randint(2, 6)
        copy = {"bytes": rng.choice([2, 2, 1]), "offload_us": copy_us, "reload_us": rng.randint(0, 3)}
        times = {kind: rng.randint(1, 2) for kind in ("forward_us", "backward_input_us", "backward_weight_us")}
        return times | {"activation_bytes": 2, "backward_weight_bytes": rng.randint(0, 2), "offload": copy}

    same, alike = stage(), rng.random() < 0.6
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": rng.randint(2, 5),
            "objective": rng.choice(["makespan", "device_span"]),
            "transfer_us": rng.choice([0, 1, 3]),
            "devices": [{"memory_bytes": rng.randint(2, 4) * rounds} for _ in range(p)],
            "stages": [(same if alike else stage()) | {"device": device} for device in devices],
            "copy_channels": {"duplex": rng.random() < 0.5, "shared_by": [[*range(p)]]},
        }
    )


SAYS_MORE = [
    *(21, 43, 62, 65, 74, 91, 96, 113, 124, 126, 135, 141, 156, 192, 199, 209, 243, 272, 274, 275, 279, 285, 297, 304),
    *(307, 326, 338, 346, 355, 381, 389, 396, 404, 418, 426, 429, 471, 484, 485, 490, 498),
]
"""The first seeds of problems on which this says more than the devices' own windows."""


@pytest.mark.parametrize("seed", some(SAYS_MORE))
def test_no_schedule_is_below(seed: int) -> None:
    problem = random_pipeline(Random(seed))
    best, bound_us = best_found(problem, 0.1), max(shared_channel_bounds_us(problem))
    assert best is not None
    assert max(warmup_cooldown_bounds_us(problem)) < bound_us <= best.value_us + 1e-9
