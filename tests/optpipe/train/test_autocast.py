"""Training under autocast equals the plain step under autocast, in the planned memory."""

from __future__ import annotations

import pytest

from optpipe.compile import compile_schedule
from optpipe.train import ModelConfig, TrainingConfig, train
from optpipe.train.check import gradient_errors, reference_step
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from optpipe.train.tasks.gpt import byte_loss
from tests.optpipe.train.cases import schedules
from tests.sample import some

SCHEDULES = schedules(2)

SAME_ROUNDINGS = 1e-5
"""On the CPU both steps round the same products to bfloat16, and differ by float32's sums alone."""


@pytest.mark.parametrize("name", some(list(SCHEDULES)))
def test_a_schedule_equals_the_plain_step_under_autocast(name: str) -> None:
    config = TrainingConfig(SCHEDULES[name], ModelConfig("tiny", autocast="bfloat16"), steps=1, check=True)
    check = train(config).check
    assert check is not None
    assert check.max_gradient_error <= SAME_ROUNDINGS
    for device in check.devices:
        assert device.live_bytes == (0, 0)
        assert device.peak_bytes == pytest.approx(device.planned_peak_bytes, rel=0.02)


def test_it_really_computes_in_bfloat16() -> None:
    """From the plain step in float32 it is a hundred times further away."""
    config = TrainingConfig(SCHEDULES["linear"], ModelConfig("tiny", autocast="bfloat16"), steps=1)
    model = Model(config, compile_schedule(SCHEDULES["linear"]), Launch(2))
    batch = model.task.batch(0)
    model.pipeline.run(*batch)
    plain = model.task.build_stages()
    reference_step(plain, byte_loss, *batch)
    assert max(gradient_errors(model, plain))[0] > 100 * SAME_ROUNDINGS


def test_the_seed_is_that_of_the_stages_too_and_replicas_differ() -> None:
    config = TrainingConfig(SCHEDULES["linear"], ModelConfig("tiny"), seed=7)
    program = compile_schedule(SCHEDULES["linear"])
    for replica in range(2):
        model = Model(config, program, Launch(2, replicas=2, rank=2 * replica))
        seeds = {stage.random.seed for stage in model.stages.values() if stage.random}
        assert seeds == {7 + replica}
