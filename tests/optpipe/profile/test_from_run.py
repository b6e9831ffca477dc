"""Problems of recorded runs: what stages can do in them is what they could do in the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from optpipe.pipelining import PlannedSchedule, recording_schedule
from optpipe.pipelining.recorder import Recorder
from optpipe.profile.from_run import join_records
from optpipe.trace.record import load_records
from solver.limits import Limits
from solver.solve import solve


@pytest.fixture
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_a_run_of_compiled_stages_is_solved_as_what_ran(tmp_path: Path) -> None:
    """Stage 1 has no B and W apart, so the problem has none, and the trainer runs what is found."""
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    modules[1].compile(backend="eager")
    stages = [PipelineStage(module, s, 2, torch.device("cpu")) for s, module in enumerate(modules)]
    schedule = PlannedSchedule(stages, recording_schedule([0, 0], 3), loss_fn=nn.functional.mse_loss)
    Recorder(schedule, tmp_path, steps=1, skip=0)
    x = torch.ones(6, 4)
    for _ in range(2):
        schedule.step(x, target=x)
    problem = join_records(load_records(tmp_path)).problem()
    assert [stage.split_backward for stage in problem.stages] == [True, False]
    assert [stage.backward_weight_us > 0 for stage in problem.stages] == [True, False]
    found = solve(problem, "search", Limits(workers=1, deterministic_limit=0.1))
    assert schedule.replan(found)
    schedule.step(x, target=x)


@pytest.mark.usefixtures("_one_process")
def test_a_run_of_frozen_stages_is_solved_without_their_backwards(tmp_path: Path) -> None:
    """Recorded with all backwards, as in a trainer that knows no other; then by what is found, and again."""
    modules = [nn.Linear(4, 4).requires_grad_(s == 1) for s in range(3)]
    stages = [PipelineStage(module, s, 3, torch.device("cpu")) for s, module in enumerate(modules)]
    schedule = PlannedSchedule(stages, recording_schedule([0, 0, 0], 3), loss_fn=nn.functional.mse_loss)
    x, gradients = torch.ones(6, 4), []
    for folder in (tmp_path / "all", tmp_path / "found"):
        Recorder(schedule, folder, steps=1, skip=0)
        for _ in range(2):
            modules[1].zero_grad()
            schedule.step(x, target=x)
        gradients.append(
            [parameter.grad.clone() for parameter in modules[1].parameters() if parameter.grad is not None]
        )
        problem = join_records(load_records(folder)).problem()
        assert [stage.backward for stage in problem.stages] == ["none", "full", "full"]
        assert schedule.replan(solve(problem, "search", Limits(workers=1, deterministic_limit=0.1)))
    assert {action.kind for action in schedule.program.actions() if action.stage == 0} == {"F", "GATHER"}
    torch.testing.assert_close(gradients[0], gradients[1])
