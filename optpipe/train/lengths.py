"""Microbatches of different sizes: their costs as multiples of those of one that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from optpipe.problem import Floats
from optpipe.runtime.messages import Tree, leaves

SAMPLES = 4
"""Microbatches from which the shapes of messages are learnt."""


class Sizes(NamedTuple):
    """Size of a microbatch: elements of the first tensor of its input, and the rows that these are of."""

    elements: int
    rows: int

    @classmethod
    def of(cls, microbatch: Tree) -> Sizes:
        """Size of an input. A tensor of one dimension is one row."""
        first: Tensor = leaves(microbatch)[0]
        return cls(first.numel(), first.shape[0] if first.dim() > 1 else 1)

    @property
    def squares(self) -> float:
        """Sum over the rows of the squares of their lengths: what attention takes grows with it."""
        return self.elements**2 / self.rows if self.rows else 0.0


@dataclass(frozen=True)
class SizeCosts:
    """Costs of microbatches as multiples of those of one of size `reference`.

    Times are shares of a constant, of the elements and of the squares (`Sizes`), which add up to 1 at the reference.
    Bytes and messages are in proportion to the elements.
    """

    reference: Sizes
    linear: float = 1.0
    quadratic: float = 0.0
    constant: float = 0.0

    def factors(self, sizes: Sequence[Sizes]) -> Floats:
        """Factors of times, of bytes, and of transfers: array (3, microbatches)."""
        elements = np.array([size.elements for size in sizes]) / max(self.reference.elements, 1)
        squares = np.array([size.squares for size in sizes]) / max(self.reference.squares, 1)
        time = self.constant + self.linear * elements + self.quadratic * squares
        return np.array([time, elements, elements])


def tokens_of(microbatch: Tree) -> int:
    """Tokens of an input: integers of its first tensor, N * T of floats of shape (N, T, C), otherwise rows."""
    first: Tensor = leaves(microbatch)[0]
    if not first.dim() or not first.is_floating_point():
        return first.numel()
    return first.shape[0] * first.shape[1] if first.dim() == 3 else first.shape[0]


def varied_samples(inputs: Sequence[Tree]) -> list[Tree]:
    """Inputs of microbatches from the shortest to the longest, at most `SAMPLES`; always as many of as many."""
    ordered = sorted((x for x in inputs if x is not None), key=lambda x: sum(leaf.numel() for leaf in leaves(x)))
    last, count = len(ordered) - 1, min(SAMPLES, len(ordered))
    return [ordered[k * last // max(1, count - 1)] for k in range(count)]
