"""Small models to profile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from optpipe.profile.measured import Measured, measure
from optpipe.profile.subject import Chain, Subject, build_chain
from tests.optpipe.train.odd_stages import Experts

CPU = torch.device("cpu")
ROWS, WIDTH = 8, 16


def perceptron(widths: Sequence[int] = (WIDTH, WIDTH, WIDTH)) -> Subject:
    """A linear layer with a GELU from each width to the next, with a mean square loss."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths)]
    inputs, targets = torch.randn(ROWS, widths[0]), torch.randn(ROWS, widths[-1])
    return Subject("perceptron", stages, inputs, targets, nn.functional.mse_loss)


def measured(
    subject: Subject, placement: Sequence[int], rounds: int = 2, modes: Sequence[str] = ("offload",)
) -> tuple[Measured, Chain]:
    """Measured in this process, for 4 microbatches."""
    chain = build_chain(subject, CPU, 4, range(len(subject.stages)))
    return measure(subject, chain, placement, CPU, rounds, modes=modes), chain


class Masked(nn.Module):
    """(x, mask) -> (x, mask)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, message: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = message
        return self.linear(x) * mask, mask


def experts(wide_rows: Sequence[int] = (2, 6)) -> Subject:
    """A stage that keeps the sign, then experts. A microbatch for each number of rows that the wide expert gets."""
    torch.manual_seed(0)
    keeps = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        keeps.weight.copy_(torch.eye(WIDTH))
        keeps.bias.zero_()
    batch = []
    for rows in wide_rows:
        inputs = torch.randn(ROWS, WIDTH)
        inputs[:, 0] = torch.where(torch.arange(ROWS) < rows, 1.0, -1.0)
        batch.append((inputs, torch.randn(ROWS, WIDTH)))
    return Subject("experts", [keeps, Experts(WIDTH)], *batch[0], nn.functional.mse_loss, batch[1:])
