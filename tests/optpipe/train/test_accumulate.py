"""Several runs of a schedule in a step: one update by the gradients of all, as of one schedule of all microbatches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from instances.schedules import one_f_one_b, v_wave
from optpipe.compile import compile_schedule
from optpipe.errors import CheckpointError
from optpipe.schedule import Schedule
from optpipe.train import CheckpointConfig, ModelConfig, OptimizerConfig, TrainingConfig, train
from optpipe.train.launch import Launch
from optpipe.train.model import Model

TINY = ModelConfig("tiny", dtype="float64", microbatch_size=2, layers=4)
CLIPPED = OptimizerConfig(clip_norm=1.9)
STEPS = 4


def config_of(schedule: Schedule, accumulate: int, **options: object) -> TrainingConfig:
    return replace(TrainingConfig(schedule, TINY, CLIPPED, steps=STEPS, accumulate=accumulate), **options)  # type: ignore[arg-type]


@cache
def whole_losses() -> tuple[float, ...]:
    return train(config_of(one_f_one_b(2, 6), 1)).losses


@pytest.mark.parametrize(
    ("schedule", "accumulate"),
    [(one_f_one_b(2, 3), 2), (v_wave(2, 2), 3), (one_f_one_b(4, 1), 6)],
    ids=["1F1B", "V", "one at a time"],
)
def test_losses_are_those_of_one_schedule_with_all_microbatches(schedule: Schedule, accumulate: int) -> None:
    result = train(config_of(schedule, accumulate, check=True))
    assert result.check is not None
    assert result.check.failures == ()
    assert result.losses == pytest.approx(whole_losses(), rel=1e-12)


def test_every_run_of_a_step_draws_numbers_of_its_own() -> None:
    """Which the plain step of the check draws as well; the same data, so losses differ by what is drawn alone."""
    dropout = ModelConfig("tests.optpipe.train.odd_stages:dropout")
    config = TrainingConfig(one_f_one_b(2, 2), dropout, steps=2, accumulate=2, check=True)
    result = train(config)
    assert result.check is not None
    assert result.check.failures == ()
    model = Model(config, compile_schedule(one_f_one_b(2, 2)), Launch(2))
    losses = model.run(*model.own_part(model.task.batch(0)))
    assert len({*losses.tolist()}) == 4
    again = model.run(*model.own_part(model.task.batch(0)))
    assert torch.equal(losses, again)


def test_updates_that_do_not_wait_have_the_same_bits() -> None:
    losses, norms = [], []
    for optimistic in (False, True):
        config = config_of(one_f_one_b(2, 2), 2, steps=8)
        assert config.schedule is not None
        model = Model(config, compile_schedule(config.schedule), Launch(2), optimistic=optimistic)
        outcomes = [outcome for step in range(8) for outcome in model.step(model.task.batch(step))] + model.settle()
        losses.append([outcome.loss for outcome in outcomes])
        norms.append([outcome.gradient_norm for outcome in outcomes])
        assert any(outcome.clipped for outcome in outcomes)
        assert any(outcome.rolled_back for outcome in outcomes) == optimistic
    assert losses[0] == losses[1]
    assert norms[0] == norms[1]


def test_a_resumed_run_has_the_losses_of_one_that_nothing_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(one_f_one_b(2, 2), 2)
    kept = replace(config, checkpoints=CheckpointConfig(tmp_path))
    first = train(replace(kept, steps=2)).losses
    assert first + train(kept).losses == train(config).losses
    with pytest.raises(CheckpointError, match=r"microbatches of a step, of all replicas, is 4 in .* but 6 now"):
        train(replace(kept, accumulate=3, steps=STEPS + 1))
    caplog.clear()
    other = replace(kept, schedule=one_f_one_b(2, 4), accumulate=1, steps=STEPS + 1)
    assert len(train(other).losses) == 1
    assert "resumed with accumulate 1; it was 2 before" in caplog.messages
