"""R13: exported schedules run in torch's own pipeline runtime, with the gradients of the plain step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from instances import uniform
from instances.schedules import one_f_one_b
from optpipe.export.torch_csv import torch_csv
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.limits import Limits
from solver.solve import solve
from tests.optpipe.runtime.schedules import random_placement, random_schedule
from tests.ranks import RunRanks

WORKER = Path(__file__).parent / "torch_runtime_worker.py"
MAX_ERROR = 1e-12
"""In float64, relative to the largest entry of the plain gradient."""
RANDOM = 6

Ranks = list[dict[str, Any]]


def interleaved(p: int, chunks: int, m: int) -> Problem:
    """p devices, stage s on device s mod p."""
    data = uniform(p * chunks, m).to_data()
    stages = [stage | {"device": s % p} for s, stage in enumerate(data["stages"])]
    return Problem.from_data(data | {"stages": stages, "devices": data["devices"][:p]})


def published(problem: Problem, method: str) -> Schedule:
    return solve(problem, method, Limits(1))


def two_device_placements() -> Iterator[Problem]:
    """Random placements that use exactly two devices."""
    rng = Random(13)
    while True:
        problem = random_placement(rng, microbatches=3)
        if len(problem.devices) == 2 and all(problem.stages_of):
            yield problem


@cache
def two_rank_schedules() -> dict[str, Schedule]:
    found = {
        "1f1b": published(uniform(2, 4), "1f1b"),
        "1f1b, offload dropped": one_f_one_b(2, 4, fused=True, moved=[(0, i) for i in range(4)]),
        "zb-h1": published(uniform(2, 4), "zb-h1"),
        "zb-v": published(uniform(2, 6, v_shape=True), "zb-v"),
    }
    problems = zip(range(RANDOM), two_device_placements(), strict=False)
    return found | {f"random {seed}": random_schedule(problem, seed) for seed, problem in problems}


@cache
def four_rank_schedules() -> dict[str, Schedule]:
    return {"interleaved-1f1b": published(interleaved(4, 2, 4), "interleaved-1f1b")}


def run(run_ranks: RunRanks, folder: Path, schedules: dict[str, Schedule], processes: int) -> Ranks:
    """Export the schedules, run each in torch's runtime; what each rank found."""
    for name, schedule in schedules.items():
        (folder / f"{name}.csv").write_text(torch_csv(schedule, drop_offload=True))
        sizes = {"stages": len(schedule.problem.stages), "microbatches": schedule.problem.microbatches}
        (folder / f"{name}.json").write_text(json.dumps(sizes))
    run_ranks(WORKER, processes, str(folder))
    return [json.loads((folder / f"rank{rank}.results").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def two_ranks(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run(run_ranks, tmp_path_factory.mktemp("two"), two_rank_schedules(), 2)


@pytest.fixture(scope="module")
def four_ranks(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run(run_ranks, tmp_path_factory.mktemp("four"), four_rank_schedules(), 4)


@pytest.mark.torchrun
@pytest.mark.parametrize("name", two_rank_schedules())
def test_on_two_ranks(two_ranks: Ranks, name: str) -> None:
    """1F1B, split backwards, V shape, and any order on any placement."""
    check(two_ranks, name, two_rank_schedules()[name])


@pytest.mark.torchrun
@pytest.mark.parametrize("name", four_rank_schedules())
def test_on_four_ranks(four_ranks: Ranks, name: str) -> None:
    """Two chunks of the model on each rank."""
    check(four_ranks, name, four_rank_schedules()[name])


def check(ranks: Ranks, name: str, schedule: Schedule) -> None:
    """Every stage ran on its device; gradients and loss are those of the plain step."""
    found = [rank[name] for rank in ranks]
    assert [rank["stages"] for rank in found] == [list(stages) for stages in schedule.problem.stages_of]
    assert max(rank["max_gradient_error"] for rank in found) <= MAX_ERROR
    [last] = [rank for rank in found if "loss" in rank]
    assert last["loss"] == pytest.approx(last["plain_loss"], rel=MAX_ERROR)
