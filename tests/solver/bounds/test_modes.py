"""Byte-time with activation modes: never above a schedule, by hand, and as without modes where there are none."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from instances import HALF, uniform
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.bounds.memory_time import memory_time_bounds_us
from solver.bounds.modes import mode_bounds_us
from solver.build import peak_budgets
from tests.recomputing import random_recomputing, recomputing


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_no_random_schedule_is_below_it(first: int) -> None:
    for seed in range(first, first + 100):
        problem, orders = random_recomputing(Random(seed))
        budgets = [{"memory_bytes": size} for size in peak_budgets(problem, orders)]
        for objective in ("makespan", "device_span"):
            tight = problem.from_data(problem.to_data() | {"devices": budgets, "objective": objective})
            assert lower_bound_us(tight) <= simulate(tight, orders).value_us * (1 + 1e-9), seed


@pytest.mark.parametrize(
    "more",
    [{}, {"offload": HALF}, {"offload": HALF, "copy_channels": {"duplex": False}}],
    ids=["kept", "half", "channel"],
)
@pytest.mark.parametrize("objective", ["makespan", "device_span"])
def test_without_modes_it_is_the_bound_by_byte_time(objective: str, more: dict[str, Any]) -> None:
    """On the first device, where memory for two microbatches asks for more time than work does."""
    problem = uniform(4, 12, budget=4, backward_weight_bytes=2, objective=objective, **more)
    assert mode_bounds_us(problem)[0] == pytest.approx(memory_time_bounds_us(problem)[0], rel=1e-6)


def test_recomputing_saves_byte_time_for_compute() -> None:
    """The first of four devices, eight microbatches of 10 bytes, 1 of them kept by recomputing for 1 us.

    Kept one takes 10 bytes for 11 us and 10 for W's, in the order of F, the way of 6, B; recomputed 1 for 8 us, 9 for
    the 2 us of C and B, and 10 for W. Ramps leave 10 * (1 + 2) / 2 of the 20 bytes unused.
    """
    mode = {"name": "full", "kept_bytes": 1, "recompute_us": 1}
    problem = recomputing(4, 8, [mode], 20, backward_weight_bytes=10)
    problem = problem.from_data(problem.to_data() | {"objective": "device_span"})
    kept, recomputed, unused = 10 * 8 + 10, 8 + 9 * 2 + 10, 10 / 2 * (1 + 2)
    # 20 T >= kept (8 - x) + recomputed x + unused and T >= 24 + x; both hold with equality at the least T.
    x = (8 * kept + unused - 20 * 24) / (20 + kept - recomputed)
    assert mode_bounds_us(problem)[0] == pytest.approx(24 + x)
