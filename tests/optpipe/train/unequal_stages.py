"""Two stages of one's own over sequences of different lengths, with a loss by tokens, data and a loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

M, VOCABULARY, WIDTH = 4, 11, 6


class TokenLoss:
    """Cross entropy over all tokens."""

    def count(self, target: Tensor) -> int:
        return target.numel()

    def __call__(self, output: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / tokens


class Odd(nn.Module):
    """Returns as many tokens as the first one says."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(ids[:, : 1 + int(ids.sum()) % ids.shape[1]])
        return embedded


def stages() -> list[nn.Module]:
    """With dropout: what is drawn belongs to a microbatch, wherever it runs."""
    return [
        nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)),
    ]


def microbatch(seed: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(VOCABULARY, (2, length + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def build() -> Any:
    return stages(), *microbatch(0, 16), TokenLoss()


def uncounted() -> Any:
    return stages(), *microbatch(0, 16), lambda output, target: output.sum() + 0 * target.sum()


def odd() -> Any:
    return [Odd(), stages()[1]], *microbatch(0, 16), TokenLoss()


def lengths(step: int) -> list[int]:
    return [3 + (7 * step + 5 * i) % 14 for i in range(M)]


def data(step: int) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [microbatch(100 * step + i, length) for i, length in enumerate(lengths(step))]
    return [x for x, _ in pairs], [y for _, y in pairs]


class Loader:
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(100):
            yield from zip(*data(step), strict=True)


def loader(_replica: int, _replicas: int) -> Loader:
    return Loader()
