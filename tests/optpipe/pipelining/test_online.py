"""A planner goes on searching where the published method is none for its stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from optpipe.errors import MethodError
from optpipe.pipelining import OnlinePlanner, PlannedSchedule, recording_schedule
from optpipe.problem import Problem
from optpipe.profile.from_run import join_records
from optpipe.trace.record import load_records
from solver.limits import Limits
from solver.solve import solve


@pytest.fixture
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def at_once(arguments: list[str]) -> SimpleNamespace:
    """The process of a command of the planner, which has ended when it begins."""
    errors, path = "", Path(arguments[arguments.index("-o") + 1])
    if arguments[0] == "profile":
        path.write_text(
            join_records(load_records(Path(arguments[arguments.index("--from-run") + 1]))).problem().to_json()
        )
    else:
        method = arguments[arguments.index("--method") + 1] if "--method" in arguments else "search"
        try:
            limits = Limits(workers=1, deterministic_limit=0.1)
            path.write_text(solve(Problem.load(arguments[1]), method, limits).to_json())
        except MethodError as error:
            errors = str(error)
    return SimpleNamespace(poll=lambda: 0, communicate=lambda: ("", errors), returncode=2 if errors else 0)


@pytest.mark.usefixtures("_one_process")
def test_compiled_stages_are_searched_though_the_published_method_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optpipe.pipelining.online.begin_optpipe", at_once)
    module = nn.Linear(4, 4)
    module.compile(backend="eager")
    stage = PipelineStage(module, 0, 1, torch.device("cpu"))
    schedule = PlannedSchedule(stage, recording_schedule([0], 3), loss_fn=nn.functional.mse_loss)
    planner = OnlinePlanner(schedule, time_limit_s=1.0, every=1, steps=1, skip=0)
    x, changed = torch.ones(6, 4), []
    while not planner.done:
        schedule.step(x, target=x)
        changed.append(planner.step_done())
    assert sum(changed) == 1
    assert schedule.schedule.method == "search"
    [failed, found] = planner.log
    assert "ada-offload splits backwards, but stages[0].split_backward is false" in failed
    assert found.startswith("search: ")
    planner.close()
