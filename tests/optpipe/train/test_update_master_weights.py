"""Parameters of bfloat16: gradients of float32, and float32 copies that the optimizer updates."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from instances.schedules import one_f_one_b, v_wave
from optpipe.schedule import Schedule
from optpipe.train import CheckpointConfig, ModelConfig, OptimizerConfig, TrainingConfig, train
from optpipe.train.checkpoint.files import read_tensors
from optpipe.train.tasks import build_task
from optpipe.train.update import stage_optimizer
from tests.optpipe.train.cases import decaying

M, STEPS = 4, 12


def config_of(schedule: Schedule, **more: object) -> TrainingConfig:
    model = ModelConfig("tiny", layers=4, sequence=16, dtype="bfloat16", tied=True)
    optimizer = OptimizerConfig(learning_rate=1e-3, clip_norm=1.5)
    return TrainingConfig(schedule, model, optimizer, steps=STEPS, **more)  # type: ignore[arg-type]


@cache
def plain_losses() -> list[float]:
    """Sums over microbatches and updates in float32, all else in bfloat16."""
    config = config_of(one_f_one_b(4, M))
    task = build_task(config, 4, M)
    model = nn.Sequential(*task.build_stages())
    names = dict(model.named_parameters())
    copies = {name: nn.Parameter(p.detach().float()) for name, p in names.items()}
    optimizer = torch.optim.AdamW(decaying(copies.values()), lr=1e-3, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        for copy in copies.values():
            copy.grad = torch.zeros_like(copy)
        total = 0.0
        for x, target in zip(*task.batch(step), strict=True):
            model.zero_grad()
            loss = task.loss(model(x), target)
            torch.autograd.backward(loss / M)
            total += loss.item() / M
            for name, p in names.items():
                copies[name].grad += p.grad  # type: ignore[arg-type]
        nn.utils.clip_grad_norm_(copies.values(), 1.5)
        optimizer.step()
        with torch.no_grad():
            for name, p in names.items():
                p.copy_(copies[name])
        losses.append(total)
    return losses


@pytest.mark.parametrize("schedule", [one_f_one_b(4, M), v_wave(2, M)], ids=["linear", "V"])
def test_losses_are_those_of_sums_and_updates_in_float32(schedule: Schedule) -> None:
    result = train(config_of(schedule, check=True))
    assert result.check is not None
    assert result.check.failures == ()
    assert result.losses == pytest.approx(plain_losses(), rel=0, abs=1e-5)
    assert result.losses[-1] < result.losses[0] - 0.25  # of the text of any Python's library: half of what it learns


def test_a_run_is_resumed_to_the_bit(tmp_path: Path) -> None:
    config = config_of(one_f_one_b(4, M), checkpoints=CheckpointConfig(tmp_path, every_steps=6, keep=9))
    losses = train(config).losses
    saved = read_tensors(tmp_path / "step-0000000006" / "stage-0001.safetensors")
    kinds = {name: tensor.dtype for name, tensor in saved.items() if ".1.widen.weight" in name}
    weight, state = "layers.1.widen.weight", "optimizer.state.layers.1.widen.weight"
    assert kinds == {weight: torch.bfloat16} | {
        f"{state}.{key}": torch.float32 for key in ("master", "exp_avg", "exp_avg_sq", "step")
    }
    shutil.rmtree(tmp_path / f"step-{STEPS:010d}")
    assert train(config).losses == losses[6:]


def test_small_updates_are_not_lost() -> None:
    """In bfloat16 1 + 0.001 is 1."""
    config = OptimizerConfig("sgd", learning_rate=1e-3, beta1=0.0, weight_decay=0.0)
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = stage_optimizer(config, [("weight", parameter)])
    assert optimizer is not None
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert parameter.tolist() == pytest.approx([0.9] * 4, abs=0.004)
    assert optimizer.state[parameter]["master"].tolist() == pytest.approx([0.9] * 4, abs=1e-5)
