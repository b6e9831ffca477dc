"""Recording a step leaves the training as it is, and holds the step against this model's own sizes."""

from __future__ import annotations

import pytest

from optpipe.errors import InputError
from optpipe.train import ModelConfig, OutputConfig, TrainingConfig, train
from tests.optpipe.runtime.schedules import v_wave

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


def test_a_step_that_is_not_run_cannot_be_recorded() -> None:
    with pytest.raises(InputError, match="trace_step is 3 but must be from 0 to 2"):
        TrainingConfig(SCHEDULE, output=OutputConfig(trace_step=3), steps=3)
