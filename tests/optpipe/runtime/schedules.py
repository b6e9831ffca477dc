"""Schedules to run: those written by hand, and random ones."""

from __future__ import annotations

from random import Random

from instances.schedules import OFFLOAD, Moved, one_f_one_b, v_wave
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.build import build_schedule
from tests.random_plans import random_orders

__all__ = ["OFFLOAD", "Moved", "one_f_one_b", "random_placement", "random_schedule", "v_wave"]


def random_schedule(problem: Problem, seed: int) -> Schedule:
    """Random orders, offloads and waits, B and W split or fused at random."""
    return build_schedule(problem, random_orders(problem, Random(seed)), 0.0, "random", 0.0)


def random_placement(rng: Random, *, microbatches: int) -> Problem:
    """Up to 5 stages anywhere on up to 3 devices, some of which offload."""
    devices = rng.randint(1, 3)
    stages = [
        {
            "device": rng.randrange(devices),
            "forward_us": rng.randint(1, 9),
            "backward_input_us": rng.randint(1, 9),
            "backward_weight_us": rng.randint(0, 9),
            "activation_bytes": 4,
            "backward_weight_bytes": rng.randint(0, 5),
            "offload": rng.choice([None, OFFLOAD]),
        }
        for _ in range(rng.randint(1, 5))
    ]
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": microbatches,
            "transfer_us": rng.randint(0, 3),
            "devices": [{"memory_bytes": None}] * devices,
            "stages": stages,
            "copy_channels": {"duplex": rng.random() < 0.5},
        }
    )
