"""Two stages whose forwards draw random numbers and keep running statistics, with weights in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Drawing(nn.Module):
    """Dropout by a function, which nobody sees from outside, after a normalisation over the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, dtype=torch.bfloat16)
        self.linear = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(self.norm(x)), 0.5)


def build() -> tuple[list[nn.Module], Tensor, Tensor, nn.Module]:
    """Stages, a microbatch, its target and the loss."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 8, generator=generator).bfloat16()
    return [Drawing(), Drawing()], x, x.flip(0), nn.MSELoss()
