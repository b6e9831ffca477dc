"""Stages that fit one another, and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe.profile.chain import chain_of
from optpipe.profile.subject import Subject
from optpipe.runtime import MessageSpec
from tests.optpipe.profile.subjects import CPU, ROWS, WIDTH, Masked, perceptron


def masked_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output[0], target)


def subject(stages: list[nn.Module], loss: Callable[..., Any] = nn.functional.mse_loss) -> Subject:
    return Subject("mine", stages, torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH), loss)


def test_messages_are_learnt_from_the_stages() -> None:
    chain = chain_of(perceptron((3, 4, 5)), CPU, 4, [0, 1])
    assert chain.messages == [MessageSpec((ROWS, 4), torch.float32)]
    assert chain.before(0) is None
    assert chain.after(0) == chain.before(1) == chain.messages[0]
    assert chain.after(1) is None
    assert chain.received(0, CPU) is chain.inputs
    assert chain.received(1, CPU).shape == chain.gradient(0, CPU).shape == (ROWS, 4)
    assert chain.gradient(1, CPU) is None


def test_under_autocast_stages_pass_on_what_they_compute() -> None:
    chain = chain_of(perceptron((3, 4, 5)), CPU, 4, [0, 1], autocast=torch.bfloat16)
    assert chain.messages == [MessageSpec((ROWS, 4), torch.bfloat16)]


def test_a_process_keeps_its_own_stages() -> None:
    assert list(chain_of(perceptron((3, 4, 5, 6)), CPU, 4, [1]).stages) == [1]


def test_messages_of_several_tensors() -> None:
    inputs = torch.zeros(ROWS, WIDTH), torch.ones(ROWS, WIDTH, dtype=torch.bool)
    chain = chain_of(Subject("m", [Masked(), Masked()], inputs, torch.zeros(ROWS, WIDTH), masked_loss), CPU, 1, [0, 1])
    x, mask = chain.received(1, CPU)
    assert (x.dtype, mask.dtype) == (torch.float32, torch.bool)
    assert chain.gradient(0, CPU)[1] is None


def test_stages_that_do_not_fit() -> None:
    with pytest.raises(InputError) as caught:
        chain_of(subject([nn.Linear(WIDTH, 4), nn.Linear(5, WIDTH)]), CPU, 4, [0, 1])
    assert "stages[1] (Linear) fails on what stages[0] returns, float32[8, 4]: RuntimeError: mat1 and mat2" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("stages", "loss", "message"),
    [
        ([nn.Linear(7, 7)], nn.functional.mse_loss, r"stages\[0\] \(Linear\) fails on the inputs, float32\[8, 16\]"),
        ([nn.Linear(16, 16)], lambda _output, _target: 0.5, "loss returns float, but must return one number"),
        ([nn.Linear(16, 16)], lambda output, _target: output, r"loss returns float32\[8, 16\], but must return one"),
        ([nn.Linear(16, 16)], nn.functional.cross_entropy, None),
        ([nn.Linear(16, 16)], nn.functional.nll_loss, r"loss fails on float32\[8, 16\] and float32\[8, 16\]"),
    ],
)
def test_bad_ends(stages: list[nn.Module], loss: Callable[..., Any], message: str | None) -> None:
    if message is None:
        assert chain_of(subject(stages, loss), CPU, 4, [0]).messages == []
        return
    with pytest.raises(InputError, match=message):
        chain_of(subject(stages, loss), CPU, 4, [0])


class Words(nn.Module):
    def forward(self, x: Tensor) -> object:
        return x, "words"


def test_a_stage_returns_tensors() -> None:
    with pytest.raises(InputError, match=r"returns str in the output of stages\[0\], but a tensor"):
        chain_of(subject([Words(), nn.Linear(16, 16)]), CPU, 4, [0, 1])
