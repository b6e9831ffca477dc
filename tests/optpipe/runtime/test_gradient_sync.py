"""Tied weights in one process; replicas and ties across processes are tested with training under torchrun."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optpipe.errors import TrainingError
from optpipe.runtime.gradient_sync import GradientSync, TiedWeights, shared_buffers, tie_groups
from optpipe.runtime.stage import Stage

TIE = TiedWeights((0, "0.weight"), (1, "weight"))


def stages(*, equal: bool = True, rows: int = 5) -> dict[int, Stage]:
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, rows, bias=False)
    if equal:
        head.weight.data.copy_(embedding.weight.data)
    return {0: Stage(nn.Sequential(embedding, nn.Linear(3, 3)), first=True), 1: Stage(head)}


def test_gradients_are_views_of_one_buffer() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()
    (buffer,) = shared_buffers(module.parameters())
    module(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    gradients = [p.grad for p in module.parameters()]
    assert torch.equal(buffer, torch.cat([g.flatten() for g in gradients if g is not None]))
    assert len(buffer) == sum(p.numel() for p in module.parameters())


def test_both_sides_of_a_tie_get_the_sum_once() -> None:
    both = stages()
    sync = GradientSync(both, ties=[(TIE, None)])
    embedding, head = both[0].module.get_parameter("0.weight"), both[1].module.get_parameter("weight")
    for stage in both.values():
        stage.zero_gradients()
    assert embedding.grad is not None
    assert head.grad is not None
    embedding.grad += 1
    head.grad += 2
    for reduce in sync.reducers.values():
        reduce()
    for _ in range(2):  # what is due is summed once
        sync.finish()
        assert embedding.grad.eq(3).all()
        assert head.grad.eq(3).all()


@pytest.mark.parametrize(
    ("given", "tie", "message"),
    [
        ({"equal": False}, TIE, "their values differ. Maybe copy one to the other"),
        ({"equal": False, "rows": 4}, TIE, r"their shapes are \(5, 3\) and \(4, 3\)"),
        ({}, TiedWeights((0, "0.weight"), (1, "bias")), "stage 1 has no 'bias'. Maybe one of weight"),
    ],
)
def test_refuses(given: dict[str, int], tie: TiedWeights, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        GradientSync(stages(**given), ties=[(tie, None)])  # type: ignore[arg-type]


def test_refuses_a_tie_with_itself() -> None:
    with pytest.raises(TrainingError, match="are the same"):
        tie_groups([TiedWeights((0, "weight"), (0, "weight"))], lambda stage: [stage])
