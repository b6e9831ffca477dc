"""A stage that keeps running statistics, which replicas gather from different microbatches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH_MICROBATCHES = 4
"""Microbatches of both replicas together."""


def build() -> tuple[list[nn.Module], Tensor, Tensor, nn.Module]:
    """The stage, a microbatch, its target and the loss."""
    (x, *_), (target, *_) = batch(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))], x, target, nn.MSELoss()


def batch(step: int) -> tuple[list[Tensor], list[Tensor]]:
    """Microbatches of a step, each of another mean."""
    generator = torch.Generator().manual_seed(step)
    inputs = [torch.randn(16, 8, generator=generator) + i for i in range(BATCH_MICROBATCHES)]
    return inputs, [x.square().mean(1, keepdim=True) for x in inputs]
