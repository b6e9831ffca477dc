"""Passes of a vocabulary layer: loss and gradients of torch's own cross entropy, whichever device has which rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optpipe.errors import TrainingError
from optpipe.runtime.vocabulary import IGNORED, VocabularyShard, rows_of

TOKENS, WIDTH, SCALE = (2, 5), 3, 0.25


def labels_by_mean(target: Tensor) -> tuple[Tensor, Tensor]:
    return target.flatten(), (target != IGNORED).sum()


def labels_by_sum(target: Tensor) -> tuple[Tensor, Tensor]:
    return target.flatten(), torch.tensor(1.0)


def by_shards(x: Tensor, weight: Tensor, target: Tensor, devices: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient of the activation and of all rows."""
    own = [rows_of(len(weight), d, devices) for d in range(devices)]
    shards = [
        VocabularyShard(nn.Parameter(weight[rows.start : rows.stop].clone()), rows.start, len(weight), **options)
        for rows in own
    ]
    for shard in shards:
        shard.make_logits(0, x, target)
    gathered = [shard.figures(0) for shard in shards]
    for shard in shards:
        shard.combine(0, gathered)
    losses = torch.stack([shard.loss(0) for shard in shards])
    assert (losses == losses[0]).all()
    if options["barriers"] == 2:
        [shard.add_weight_gradient(0) for shard in shards]
    gradient = sum(shard.take_gradient(0) for shard in shards)
    if options["barriers"] == 1:
        [shard.add_weight_gradient(0) for shard in shards]
    assert isinstance(gradient, Tensor)
    return losses[0], gradient, torch.cat([shard.weight.grad for shard in shards if shard.weight.grad is not None])


CASES = {
    "divides": (8, 2, lambda target: target),
    "does not divide": (7, 3, lambda target: target),
    "fewer rows than devices need": (5, 4, lambda target: target % 5),
    "all labels in the last shard": (8, 4, lambda target: target % 2 + 6),
    "some ignored": (8, 2, lambda target: target.where(target % 3 != 0, IGNORED)),
}


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_the_whole_layer(name: str, reduction: str, barriers: int) -> None:
    vocabulary, devices, labels = CASES[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*TOKENS, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, WIDTH, dtype=torch.float64, generator=generator)
    weight *= torch.linspace(-300, 300, vocabulary, dtype=torch.float64)[:, None]  # shards differ by e**1000 and more
    weight.requires_grad_()
    target = labels(torch.randint(vocabulary, TOKENS, generator=generator))
    expected = nn.functional.cross_entropy((x @ weight.T).flatten(0, 1), target.flatten(), reduction=reduction)
    gradients = torch.autograd.grad(SCALE * expected, (x, weight))
    found = by_shards(
        x.detach(),
        weight.detach(),
        target,
        devices,
        labels=labels_by_mean if reduction == "mean" else labels_by_sum,
        gradient_scale=SCALE,
        barriers=barriers,
    )
    for one, other in zip(found, (expected.detach(), *gradients), strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12 * float(other.abs().max()))


def test_a_label_that_is_no_row_is_named() -> None:
    shard = VocabularyShard(nn.Parameter(torch.ones(2, WIDTH)), 0, 4, labels_by_mean)
    with pytest.raises(TrainingError, match="a label is 4 but must be from 0 to 3"):
        shard.make_logits(0, torch.ones(2, WIDTH), torch.tensor([3, 4]))
