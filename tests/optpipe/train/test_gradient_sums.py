"""Tied weights and replicas: gradients equal the plain step's, and what is tied stays equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from optpipe.compile import compile_schedule
from optpipe.errors import TrainingError
from optpipe.schedule_text import schedule_text
from optpipe.train import ModelConfig, TrainingConfig, train
from optpipe.train.gpt import tied_weights
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from optpipe.train.text import Batches, standard_library_text
from tests.optpipe.train.cases import MAX_ERROR, schedules
from tests.ranks import RunRanks

MAIN = Path(__file__).parents[1] / "cli" / "main_worker.py"


@pytest.mark.parametrize("name", schedules(2))
def test_tied_weights_get_the_plain_gradient_in_one_process(name: str) -> None:
    config = TrainingConfig(schedules(2)[name], ModelConfig("tiny", dtype="float64", tied=True), steps=2, check=True)
    result = train(config)
    assert result.check is not None
    assert result.check.max_gradient_error <= MAX_ERROR["float64"]
    untied = train(TrainingConfig(schedules(2)[name], ModelConfig("tiny", dtype="float64"), steps=2))
    assert result.losses != untied.losses


def test_tied_weights_stay_equal() -> None:
    schedule = schedules(2)["linear"]
    config = TrainingConfig(schedule, ModelConfig("tiny", tied=True))
    model = Model(config, compile_schedule(schedule, reduce_gradients=True), Launch(len(schedule.devices)))
    batches = Batches(standard_library_text(), microbatches=model.program.microbatches, size=4, sequence=32, seed=0)
    for step in range(3):
        model.step(batches.batch(step))
    modules = [model.stages[s].module for s in sorted(model.stages)]
    first, last = tied_weights(2, 2)
    embedding, head = modules[0].get_parameter(first), modules[-1].get_parameter(last)
    assert embedding is not head
    assert torch.equal(embedding, head)


@pytest.mark.torchrun
@pytest.mark.parametrize("name", ["linear", "V"])
def test_two_replicas_of_two_devices_get_the_plain_gradient_of_the_whole_batch(
    run_ranks: RunRanks, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(schedule_text(schedules(2)[name]))
    options = "--model tiny --steps 2 --dtype float64 --check --data-parallel 2 --tied --json"
    found: dict[str, Any] = json.loads(run_ranks(MAIN, 4, "train", "--schedule", str(path), *options.split()))
    assert found["processes"] == 4
    assert found["check"]["max_gradient_error"] <= MAX_ERROR["float64"]
    assert found["check"]["loss_error"] <= MAX_ERROR["float64"]
    assert len(found["check"]["devices"]) == 2
    assert all(device["live_bytes"] == [0, 0] for device in found["check"]["devices"])


def test_replicas_need_torchrun() -> None:
    with pytest.raises(TrainingError, match=r"data_parallel is 2, but one process runs one replica. Maybe start it"):
        train(TrainingConfig(schedules(2)["linear"], ModelConfig("tiny"), data_parallel=2))
