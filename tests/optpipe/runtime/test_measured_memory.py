"""The bytes that are alive are those that were planned: 1F1B, ZB-H1, V-Half, and a proved optimum with offload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from instances import WHOLE, uniform
from instances.schedules import one_f_one_b
from optpipe.compile import compile_schedule
from optpipe.problem import Problem
from optpipe.runtime import MessageSpec, Stage
from optpipe.runtime.probe import measure_stage, with_measured_sizes
from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, TrainingConfig, train
from optpipe.train.config import SIZES, GPTShape
from optpipe.train.tasks.gpt import build_stages, byte_loss
from solver.limits import Limits
from solver.solve import solve
from tests.ranks import RunRanks

WORKER = Path(__file__).parent / "torch_schedule_worker.py"

P, M = 4, 4


def measured(problem: Problem) -> Problem:
    """The problem with the sizes of the tiny GPT's stages, one block each."""
    width, heads, length = SIZES["tiny"]
    modules = build_stages(GPTShape(width, heads, length, P), P, seed=0, dtype=torch.float32)
    sequences = torch.zeros(4, length, dtype=torch.int64)
    spec = MessageSpec((4, length, width), torch.float32)
    sizes = [
        measure_stage(
            Stage(module, first=s == 0, loss=byte_loss if s == P - 1 else None),
            (sequences, sequences),
            spec if s > 0 else None,
            spec if s < P - 1 else None,
        )
        for s, module in enumerate(modules)
    ]
    return with_measured_sizes(problem, sizes)


def optimum_with_offload() -> Schedule:
    """Within half of what 1F1B holds on the first device; the last one, which offloads nothing, keeps its own."""
    problem = measured(uniform(P, M, offload=WHOLE))
    first, *_, last = (device.peak_bytes for device in solve(problem, "1f1b").devices)
    budgets = [{"memory_bytes": size} for size in [first // 2] * (P - 1) + [last]]
    schedule = solve(Problem.from_data(problem.to_data() | {"devices": budgets}), "cp-sat", Limits(500, workers=1))
    assert schedule.status == "optimal"
    assert compile_schedule(schedule).offloaded
    return schedule


SCHEDULES = {
    "1F1B": lambda: solve(uniform(P, M), "1f1b"),
    "ZB-H1": lambda: solve(uniform(P, M), "zb-h1"),
    "V-Half": lambda: solve(uniform(P, M, v_shape=True), "v-half"),
    "optimum with offload": optimum_with_offload,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_peaks_are_within_two_percent_of_the_plan_on_every_device(name: str) -> None:
    check = train(TrainingConfig(SCHEDULES[name](), ModelConfig("tiny"), steps=1, check=True)).check
    assert check is not None
    assert check.max_gradient_error < 1e-5
    for device in check.devices:
        assert device.live_bytes == (0, 0)
        assert device.peak_bytes == pytest.approx(device.planned_peak_bytes, rel=0.02)


@pytest.mark.torchrun
def test_1f1b_never_holds_more_than_in_the_runtime_of_torch(run_ranks: RunRanks, tmp_path: Path) -> None:
    schedule = one_f_one_b(2, 4, fused=True)
    file = tmp_path / "schedule.json"
    file.write_text(json.dumps(schedule.to_data() | {"problem": schedule.problem.to_data()}))
    run_ranks(WORKER, 2, str(tmp_path), str(file))
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["gradient_error"] <= 1e-5
        assert 0 < found["peak_bytes"] <= found["torch_peak_bytes"]
