"""Which searches `auto` runs: to proof on small problems, no models on the largest, every core in use."""

from __future__ import annotations

import pytest

from optpipe.problem import Problem
from solver.auto import LARGE_OPS, MOST_MODEL_OPS, SMALL_OPS, auto_lanes
from solver.size import count_ops
from tests.problems import uniform

SMALL, MEDIUM, LARGE, LARGEST = uniform(4, 8), uniform(8, 64), uniform(8, 1024), uniform(32, 1024)


def test_the_sizes_are_what_they_are_called() -> None:
    small, medium, large, largest = map(count_ops, (SMALL, MEDIUM, LARGE, LARGEST))
    assert small <= SMALL_OPS < medium <= LARGE_OPS < large <= MOST_MODEL_OPS < largest


@pytest.mark.parametrize(
    ("problem", "methods"),
    [
        (SMALL, {"search", "cp-sat", "windows"}),
        (MEDIUM, {"search", "pattern", "windows", "bound"}),
        (LARGE, {"search", "pattern", "windows", "bound"}),
        (LARGEST, {"search", "pattern"}),
    ],
    ids=["small", "medium", "large", "largest"],
)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_searches_and_cores(problem: Problem, methods: set[str], workers: int) -> None:
    lanes = auto_lanes(problem, workers)
    assert {turn.method for lane in lanes for turn in lane} == methods
    assert all(sum(turn.share for turn in lane) <= 1 for lane in lanes)
    assert sum(max(turn.workers for turn in lane) for lane in lanes) == workers
