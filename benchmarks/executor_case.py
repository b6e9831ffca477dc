"""Case of the executor benchmark: stages with almost no compute, so that the host's cost dominates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

WIDTH = 8
SIZE = 4
"""Rows of a microbatch."""


@dataclass(frozen=True)
class Case:
    """Parameters of a run. `contenders` are named "schedule, runtime"; each runs `rounds` times `steps` steps."""

    devices: int
    microbatches: int
    contenders: list[str]
    rounds: int
    steps: int


def stage_module(number: int) -> nn.Module:
    """Linear layer with the same weights for every runtime."""
    torch.manual_seed(number)
    return nn.Linear(WIDTH, WIDTH)


def batch(microbatches: int) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets by microbatch."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, microbatches, SIZE, WIDTH, generator=generator)
    return list(inputs), list(targets)
