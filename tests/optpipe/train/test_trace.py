"""Recording a step leaves the training as it is, and holds the step against this model's own sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from instances.schedules import v_wave
from optpipe.errors import InputError
from optpipe.train import CheckpointConfig, ModelConfig, OnlineConfig, OutputConfig, TrainingConfig, train
from tests.optpipe.train.resolve.solvers import Scripted

SCHEDULE = v_wave(2, 3, moved=[(0, 0), (2, 1)])


def test_losses_are_the_same_with_a_trace() -> None:
    plain = train(TrainingConfig(SCHEDULE, ModelConfig("tiny"), steps=3))
    traced = train(TrainingConfig(SCHEDULE, ModelConfig("tiny"), output=OutputConfig(trace_step=1), steps=3))
    assert traced.losses == plain.losses
    assert plain.trace is None
    assert traced.trace is not None
    assert traced.trace.step == 1
    assert traced.trace.schedule == SCHEDULE


def test_memory_is_as_planned_with_the_models_own_sizes() -> None:
    result = train(
        TrainingConfig(SCHEDULE, ModelConfig("tiny"), output=OutputConfig(trace_step=0), steps=1, check=True)
    )
    assert result.trace is not None
    assert result.check is not None
    for device, checked in zip(result.trace.devices, result.check.devices, strict=True):
        assert device.peak_bytes == checked.peak_bytes
        assert device.planned_peak_bytes == checked.planned_peak_bytes
        assert device.memory.bytes[-1] == 0


def test_a_schedule_that_was_found_is_the_one_recorded() -> None:
    online = OnlineConfig("first", devices=2, microbatches=4, rounds=1)
    config = TrainingConfig(None, ModelConfig("tiny"), online=online, output=OutputConfig(trace_step=0), steps=1)
    result = train(config, None, Scripted(["zb-h1"]))
    assert result.trace is not None
    assert result.trace.schedule == result.schedule
    assert result.trace.schedule.method == "zb-h1"


def test_a_resumed_run_records_a_step_of_its_own_or_says_that_it_cannot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = TrainingConfig(SCHEDULE, ModelConfig("tiny"), checkpoints=CheckpointConfig(tmp_path), steps=2)
    train(config)
    resumed = train(replace(config, steps=4, output=OutputConfig(trace=tmp_path / "trace.json")))
    assert resumed.trace is not None
    assert resumed.trace.step == 3
    assert "no step is recorded" not in caplog.text
    assert train(replace(config, steps=5, output=OutputConfig(trace_step=1))).trace is None
    assert "no step is recorded: that would be step 1, and this run goes on with step 4" in caplog.messages


def test_a_step_that_is_not_run_cannot_be_recorded() -> None:
    with pytest.raises(InputError, match="trace_step is 3 but must be from 0 to 2"):
        TrainingConfig(SCHEDULE, output=OutputConfig(trace_step=3), steps=3)
