"""Shapes of messages learnt from the stages, in one process and as several would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from optpipe.errors import TrainingError
from optpipe.runtime import Stage
from optpipe.runtime.message_shapes import learn_messages
from optpipe.runtime.messages import MessageSpec
from tests.optpipe.runtime.chains import batch, chain, specs, stages_of


def test_a_chain_of_tensors() -> None:
    inputs, targets = batch(4)
    assert learn_messages(stages_of(chain(4)), 4, inputs[0], targets[0]) == specs(4)


class Fork(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"both": (x, [x.long()])}


def test_trees_and_integers_come_as_they_are() -> None:
    stages = {0: Stage(Fork(), first=True), 1: Stage(nn.Identity()), 2: Stage(nn.Identity())}
    spec = {"both": (MessageSpec((2, 3), torch.float32), [MessageSpec((2, 3), torch.int64)])}
    assert learn_messages(stages, 3, torch.zeros(2, 3), None) == [spec, spec]


class Named(NamedTuple):
    hidden: torch.Tensor


class Making(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: (x, None), "returned NoneType in its output, but only tensors"),
        (lambda x: {"hidden": x, "count": 3}, "returned int in its output, but only tensors"),
        (lambda x: [Named(x)], "returned the named tuple Named, .* Maybe return a dict"),
    ],
)
def test_what_cannot_be_a_message_is_refused(make: Callable[[torch.Tensor], Any], message: str) -> None:
    stages = {0: Stage(Making(make), first=True), 1: Stage(nn.Identity())}
    with pytest.raises(TrainingError, match=message):
        learn_messages(stages, 2, torch.zeros(2, 3), None)


def test_a_process_learns_of_stages_that_are_elsewhere() -> None:
    """The middle one of three processes: it hears the shape before its stage, and says the one behind."""
    stages, said = stages_of(chain(3)), []

    def gather(mine: Any) -> list[Any]:
        said.append(mine)
        return [{"tensor": ["float32", [2, 10]]}, None, None] if mine is None else [None, mine, None]

    assert learn_messages({1: stages[1]}, 3, None, None, gather) == specs(3)
    assert said == [None, {"tensor": ["float32", [2, 4]]}]


def test_learning_changes_no_statistics_and_draws_no_random_numbers() -> None:
    norm = nn.BatchNorm1d(3)
    stages = {0: Stage(nn.Sequential(norm, nn.Dropout(0.5)), first=True), 1: Stage(nn.Identity())}
    before = torch.get_rng_state()
    learn_messages(stages, 2, torch.randn(4, 3, generator=torch.Generator()), None)
    assert norm.num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert norm.training
