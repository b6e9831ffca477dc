"""The optimizer of a stage: what decays, and optimizers of a user's own."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from instances.schedules import one_f_one_b
from optpipe.errors import InputError
from optpipe.train import CheckpointConfig, ModelConfig, OptimizerConfig, TrainingConfig, train
from optpipe.train.check import reference_step
from optpipe.train.tasks import build_task
from optpipe.train.update import learning_rate, stage_optimizer
from tests.optpipe.train import update_own_optimizers as own_optimizers

OWN = own_optimizers.__name__
LAYERS = nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3), nn.Linear(3, 4))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_vectors_do_not_decay_by_default(name: str) -> None:
    def decays(**chosen: bool) -> dict[str, float]:
        optimizer = stage_optimizer(OptimizerConfig(name, weight_decay=0.1, **chosen), LAYERS.named_parameters())
        assert optimizer is not None
        names = {id(p): name for name, p in LAYERS.named_parameters()}
        return {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}

    expected = {"0.weight": 0.1, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.1, "2.bias": 0.0}
    assert decays() == expected
    assert decays(decay_vectors=True) == dict.fromkeys(expected, 0.1)


def config_of(function: str, **more: object) -> TrainingConfig:
    optimizer = OptimizerConfig(f"{OWN}:{function}", learning_rate=0.05, decay="cosine", warm_up_steps=1)
    return TrainingConfig(one_f_one_b(2, 2), ModelConfig("tiny", sequence=8), optimizer, steps=4, **more)  # type: ignore[arg-type]


def test_ones_own_keeps_its_rates_and_follows_the_schedule() -> None:
    config = config_of("two_rates")
    task = build_task(config, 2, 2)
    modules = task.build_stages()
    optimizer = own_optimizers.two_rates(list(nn.Sequential(*modules).named_parameters()), config.optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert len(rates) == 2
    plain = []
    for step in range(4):
        plain.append(reference_step(modules, task.loss, *task.batch(step)))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * learning_rate(config.optimizer, step, 4) / 0.05
        optimizer.step()
    assert train(config).losses == pytest.approx(plain, rel=1e-5)


def test_a_run_with_ones_own_is_resumed(tmp_path: Path) -> None:
    config = config_of("two_rates", checkpoints=CheckpointConfig(tmp_path, every_steps=2, keep=9))
    losses = train(config).losses
    shutil.rmtree(tmp_path / "step-0000000004")
    assert train(config).losses == losses[2:]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("lazy", "leaves out 0.byte.weight, which would not be trained. Maybe freeze it where it is made."),
        ("none", "returns NoneType, but must return a torch.optim.Optimizer of the named parameters."),
        ("broken", "raises ValueError: no optimizer today at update_own_optimizers.py:"),
        ("missing", "has no missing."),
    ],
)
def test_a_wrong_one_is_refused(function: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        train(config_of(function))


def test_settings_that_mean_nothing_are_refused() -> None:
    for options, message in (
        ({"name": "adam"}, "name is 'adam' but must be one of adamw, sgd, or package.module:callable."),
        ({"decay_floor": 0.1}, "decay_floor is 0.1, but there is no decay. Maybe cosine."),
        ({"decay": "cosine", "decay_steps": 3}, "decay_steps is 3, but decay is cosine. Maybe wsd."),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            OptimizerConfig(**options)  # type: ignore[arg-type]


def test_adamw_is_fused_on_gpus_alone() -> None:
    optimizer = stage_optimizer(OptimizerConfig(), LAYERS.named_parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert not optimizer.defaults["fused"]
