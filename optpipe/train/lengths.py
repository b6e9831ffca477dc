"""Microbatches of different sizes: their costs as multiples of those of one that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from torch import Tensor

from optpipe.problem import Floats
from optpipe.runtime.messages import Tree, leaves

OUTLIER = 6
"""A time is left out of a fit if it is this many times as far off as half of them."""

SAMPLES = 4
"""Microbatches from which the shapes of messages are learnt."""


class Sizes(NamedTuple):
    """Size of a microbatch: elements of the largest tensor of its input, and the rows that these are of."""

    elements: int
    rows: int

    @classmethod
    def of(cls, microbatch: Tree) -> Sizes:
        """Size of an input. A tensor of one dimension is one row."""
        largest: Tensor = max(leaves(microbatch), key=Tensor.numel)
        return cls(largest.numel(), largest.shape[0] if largest.dim() > 1 else 1)

    @property
    def squares(self) -> float:
        """Sum over the rows of the squares of their lengths: what attention takes grows with it."""
        return self.elements**2 / self.rows if self.rows else 0.0


@dataclass(frozen=True)
class SizeCosts:
    """Costs of microbatches by their sizes.

    Times are a constant, a part for each element and one for each of the squares (`Sizes`), in any unit. Bytes and
    messages are in proportion to the elements.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    constant: float = 0.0

    def factors(self, sizes: Sequence[Sizes], reference: Sizes) -> Floats:
        """Factors of times, of bytes, and of transfers where a microbatch of size `reference` has 1.

        Array of shape (3, microbatches).
        """
        elements = np.array([size.elements for size in sizes]) / max(reference.elements, 1)
        return np.array([self._times(sizes) / self._times([reference]), elements, elements])

    def _times(self, sizes: Sequence[Sizes]) -> Floats:
        elements, squares = np.array([(size.elements, size.squares) for size in sizes], np.float64).T
        return np.asarray(self.constant + self.linear * elements + self.quadratic * squares)


def fit_times(sizes: Sequence[Sizes], times_us: Sequence[float]) -> Floats:
    """Least-squares fit of times: their constant, linear and quadratic parts (`SizeCosts`), none of them negative.

    Times that are far off, such as those with a pause of the interpreter in them, do not count.
    """
    columns = np.array([(1.0, size.elements, size.squares) for size in sizes])
    times = np.asarray(times_us, np.float64)
    scale = columns.max(axis=0).clip(1)
    found = _non_negative(columns / scale, times)
    off = np.abs(columns / scale @ found - times)
    near = off <= OUTLIER * np.median(off)
    return np.asarray(_non_negative(columns[near] / scale, times[near]) / scale)


def _non_negative(columns: Floats, values: Floats) -> Floats:
    """Least squares with no negative coefficient: the best of all subsets of the few columns."""
    best, least = np.zeros(columns.shape[1]), float(values @ values)
    for count in range(1, columns.shape[1] + 1):
        for subset in combinations(range(columns.shape[1]), count):
            found = np.linalg.lstsq(columns[:, subset], values)[0]
            error = float(((columns[:, subset] @ found - values) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(columns.shape[1]), error
                best[list(subset)] = found
    return best


def typical(factors: Floats, microbatches: int) -> Floats:
    """Factors of so many microbatches that stand for all of these, by the quantiles of their times."""
    ranked = factors[:, np.argsort(factors[0], kind="stable")]
    places = (np.arange(microbatches) + 0.5) * ranked.shape[1] / microbatches
    return np.asarray(ranked[:, places.astype(np.int64)])


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
