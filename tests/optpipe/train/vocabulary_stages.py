"""Stages with a vocabulary layer of 7 rows, with labels that are ignored, or all of one device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from optpipe.models.loss import IGNORED, LabelLoss

VOCABULARY, WIDTH, SEQUENCES, TOKENS = 7, 8, 2, 6

Built = tuple[list[nn.Module], Tensor, Tensor, LabelLoss]


class Head(nn.Module):
    """A norm, and a vocabulary layer."""

    vocabulary_layer = "logits"

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(x))
        return logits


class Biased(Head):
    """A layer with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(WIDTH, VOCABULARY)


def _built(head: nn.Module, target: Tensor, *, shift: bool = False) -> Built:
    inputs = torch.randint(VOCABULARY, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1))
    stages: list[nn.Module] = [nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH))]
    stages += [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), nn.Sequential(nn.Linear(WIDTH, WIDTH), head)]
    return [stage.double() for stage in stages], inputs, target, LabelLoss(shift=shift)


def _tied(built: Built) -> Built:
    built[0][-1][1].logits.weight = built[0][0][0].weight  # type: ignore[index,union-attr]
    return built


def ignored() -> Built:
    target = torch.arange(SEQUENCES * TOKENS).reshape(SEQUENCES, TOKENS) % VOCABULARY
    return _built(Head(), target.where(target % 3 != 0, IGNORED), shift=True)


def one_shard() -> Built:
    return _built(Head(), torch.full((SEQUENCES, TOKENS), VOCABULARY - 1))


def tied() -> Built:
    return _tied(ignored())


def tied_in_one_shard() -> Built:
    return _tied(one_shard())


def biased() -> Built:
    return _built(Biased(), torch.zeros(SEQUENCES, TOKENS, dtype=torch.long))


def no_layer() -> Built:
    return _built(nn.Linear(WIDTH, VOCABULARY), torch.zeros(SEQUENCES, TOKENS, dtype=torch.long))


def not_linear() -> Built:
    head = Head()
    head.logits = nn.Sequential(head.logits)  # type: ignore[assignment]
    return _built(head, torch.zeros(SEQUENCES, TOKENS, dtype=torch.long))


class Embedded(nn.Module):
    """Adds the embedding of the first token to what it gets."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = x + self.embedding.weight[0]
        return embedded


def tied_twice() -> Built:
    stages, *others = tied()
    stages[1].append(Embedded(stages[0][0]))  # type: ignore[operator,index,arg-type]
    return stages, *others


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.sum(-1) - target).square().mean()


def own_loss() -> tuple[list[nn.Module], Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
    return *one_shard()[:3], mean_loss
