"""Stages of your own: a residual network that learns a function of 16 numbers, cut into four stages.

optpipe profile --model examples.own_stages:build --devices 4 --microbatches 8 -o problem.json
optpipe solve problem.json -o schedule.json
optpipe train --schedule schedule.json --model examples.own_stages:build --data examples.own_stages:batch --steps 200
"""

import torch
from torch import Tensor, nn

ROWS, WIDTH, MICROBATCHES = 64, 128, 8


class Block(nn.Module):
    """Residual block of a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, width) to (rows, width)."""
        added: Tensor = x + self.layers(x)
        return added


def build() -> tuple[list[nn.Module], Tensor, Tensor, nn.Module]:
    """Return the stages, one microbatch and its target for shapes, and the loss."""
    stages = [nn.Sequential(Block(), Block()) for _ in range(4)]
    stages[0].insert(0, nn.Linear(16, WIDTH))
    stages[-1].append(nn.Linear(WIDTH, 1))
    return list(stages), torch.zeros(ROWS, 16), torch.zeros(ROWS, 1), nn.MSELoss()


def batch(step: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the microbatches of a step, which depend on its number alone, so that a resumed run sees the same."""
    x = torch.randn(MICROBATCHES, ROWS, 16, generator=torch.Generator().manual_seed(step))
    y = torch.sin(x).sum(dim=-1, keepdim=True)
    return list(x), list(y)
