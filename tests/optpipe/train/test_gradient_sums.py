"""Tied weights and replicas: gradients equal the plain step's, and what is tied stays equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optpipe.compile import compile_schedule
from optpipe.errors import TrainingError
from optpipe.schedule import schedule_text
from optpipe.train import ModelConfig, TrainingConfig, train
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from tests.optpipe.train.cases import MAX_ERROR, schedules
from tests.ranks import RunRanks
from tests.sample import some

MAIN = Path(__file__).parents[1] / "cli" / "main_worker.py"


@pytest.mark.parametrize("name", some(list(schedules(2))))
def test_tied_weights_get_the_plain_gradient_in_one_process(name: str) -> None:
    config = TrainingConfig(schedules(2)[name], ModelConfig("tiny", dtype="float64", tied=True), steps=2, check=True)
    result = train(config)
    assert result.check is not None
    assert result.check.max_gradient_error <= MAX_ERROR["float64"]
    untied = train(TrainingConfig(schedules(2)[name], ModelConfig("tiny", dtype="float64"), steps=2))
    assert result.losses != untied.losses


def test_tied_weights_are_one_parameter() -> None:
    """Each of two devices in one process has a gradient of its own, and both have the memory of one weight."""
    schedule = schedules(2)["linear"]
    config = TrainingConfig(schedule, ModelConfig("tiny", tied=True))
    model = Model(config, compile_schedule(schedule), Launch(len(schedule.devices)))
    for step in range(3):
        model.step(model.task.batch(step))
    first, last = model.stages[0].module, model.stages[1].module
    embedding, head = first.get_parameter("0.byte.weight"), last.get_parameter("1.head.weight")
    assert embedding.data_ptr() == head.data_ptr()
    states = [len(optimizer.state) for optimizer in model.optimizers.values()]
    assert states == [len([*first.parameters()]), len([*last.parameters()]) - 1]


@pytest.mark.torchrun
@pytest.mark.parametrize("name", some(["linear", "V"]))
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
