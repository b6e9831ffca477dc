"""Layers whose weight gradients are not deferred are found, named, and their share of the backward is measured."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from instances.schedules import one_f_one_b
from optpipe.profile.subject import Subject
from optpipe.runtime.stage import Stage
from optpipe.runtime.weight_gradients import undeferred_layers
from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, TrainingConfig, train
from solver.solve import solve
from tests.optpipe.profile.subjects import measured

WIDTH, ROWS = 256, 512


class Transposed(nn.Module):
    """y = x @ weight in a way that is not recognised: a kind that no split is registered for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ni,io->no", x, self.weight)


class Subclass(nn.Linear):
    """A subclass may compute something else."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, 2 * self.weight, self.bias)


def half() -> tuple[list[nn.Module], Tensor, Tensor, nn.Module]:
    """Half of the second stage's weight gradients cannot be deferred."""
    second = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Transposed())
    x = torch.randn(ROWS, WIDTH)
    return [nn.Linear(WIDTH, WIDTH), second], x, x.clone(), nn.MSELoss()


def fused() -> Schedule:
    return solve(one_f_one_b(2, 2).problem, "1f1b")


def test_what_is_not_deferred_is_found_by_kind() -> None:
    hooked = nn.Linear(4, 4)
    hooked.weight.register_hook(lambda gradient: gradient)
    frozen = nn.Bilinear(4, 4, 4).requires_grad_(False)
    stage = Stage(
        nn.Sequential(nn.Linear(4, 4), Subclass(4, 4), nn.LayerNorm(4), hooked, nn.Sequential(Transposed()), frozen)
    )
    found = {kind: list(layers) for kind, layers in undeferred_layers(stage.module).items()}
    assert found == {"Subclass": ["1"], "Linear": ["3"], "Transposed": ["4.0"]}


def test_a_profile_names_them_with_their_share_of_the_backward() -> None:
    stages, inputs, targets, loss = half()
    found, _ = measured(Subject("half", stages, inputs, targets, loss), [0, 1])
    assert found.stages[0].undeferred == ()
    [one] = found.stages[1].undeferred
    assert (one.stage, one.kind, one.layers) == (1, "Transposed", ("2",))
    assert 0.05 < one.share < 0.6, "one of four matrix products"
    assert str(one).startswith(
        f"stages[1]: {one.share:.0%} of the backward's time stays in B: no weight gradient of Tra"
    )


def test_training_names_them_where_the_schedule_splits(caplog: pytest.LogCaptureFixture) -> None:
    model = ModelConfig(f"{__name__}:half")
    with caplog.at_level(logging.WARNING, "optpipe.train"):
        train(TrainingConfig(one_f_one_b(2, 2), model, steps=1))
        [said] = [text for text in caplog.messages if "stays in B" in text]
        assert "no weight gradient of Transposed (2) is deferred" in said
        caplog.clear()
        train(TrainingConfig(fused(), model, steps=1))
        assert "stays in B" not in caplog.text
