"""Microbatches of different sizes: draws of lengths, and costs as multiples of those of one that was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from optpipe.errors import InputError, Issue
from optpipe.problem import Floats
from optpipe.runtime.messages import Tree, leaves
from optpipe.sequences import load_lengths
from optpipe.stage import UnitFactors
from optpipe.train.config import ModelConfig

OUTLIER = 6
"""A time is left out of a fit if it is this many times as far off as half of them."""

SAMPLES = 4
"""Microbatches from which the shapes of messages are learnt."""


MEDIAN, DEVIATION = 0.4, 0.6
"""Log-normal lengths: their median as a share of the longest, and the deviation of their logarithms."""

SHORT, LONG, LONG_ONES, SPREAD = 0.1, 0.8, 0.25, 1 / 6
"""Bimodal lengths: means as shares of the longest, the share of long ones, and deviations as shares of the means."""


class DrawnLengths:
    """Lengths of the sequences of text in each microbatch, at most `longest`; the same for the same seed and step.

    Log-normal ones have a median of `MEDIAN` of the longest, and none is below `MEDIAN` of that. Of a file each of its
    lengths is as likely. Raises InputError if the file has none, or longer ones.
    """

    def __init__(self, config: ModelConfig, longest: int) -> None:
        self._config, self._longest = config, longest
        self._of_file: Tensor | None = None
        if config.length_file is not None:
            self._of_file = torch.tensor([*chain.from_iterable(load_lengths(config.length_file))])
            if (most := int(self._of_file.max())) > longest:
                detail = (
                    f"holds a length of {most:,}, but sequences have at most {longest:,} tokens. Maybe a larger "
                    "sequence, or lengths of its parts."
                )
                raise InputError([Issue("model.length_file", "too_long", detail)])

    def draw(self, step: int, microbatches: int, generator: torch.Generator) -> list[int]:
        """Lengths of the microbatches of a step; `generator` is the run's, for lengths without a seed of their own."""
        if self._config.length_seed is not None:
            generator = step_generator(self._config.length_seed, step)
        if self._of_file is not None:
            drawn = torch.randint(len(self._of_file), (microbatches,), generator=generator)
            return [int(length) for length in self._of_file[drawn]]
        numbers = torch.empty(microbatches, dtype=torch.float64)
        if self._config.length_distribution == "bimodal":
            long = numbers.clone().uniform_(generator=generator) < LONG_ONES
            means = torch.where(long, LONG, SHORT)
            shares = means * numbers.normal_(1, SPREAD, generator=generator).clamp(min=SPREAD)
        else:
            shares = (MEDIAN * numbers.log_normal_(0, DEVIATION, generator=generator)).clamp(min=MEDIAN * MEDIAN)
        return [max(1, round(share * self._longest)) for share in shares.clamp(max=1).tolist()]

    def identity(self) -> dict[str, Any]:
        """JSON values that tell these draws from others; those of a run's own seed and log-normal lengths have none."""
        own: dict[str, Any] = {}
        if self._of_file is not None:
            own["length_file"] = [len(self._of_file), int(self._of_file.sum())]
        elif self._config.length_distribution != "log-normal":
            own["length_distribution"] = self._config.length_distribution
        return own if self._config.length_seed is None else own | {"length_seed": self._config.length_seed}


def step_generator(seed: int, step: int) -> torch.Generator:
    """Generator of the draws of one step of a run."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)


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


TIMES = UnitFactors._fields[: UnitFactors._fields.index("bytes")]
"""Kinds of times that a microbatch has a factor of."""


@dataclass(frozen=True)
class SizeCosts:
    """Costs of microbatches by their sizes.

    `times`: for each of `TIMES` a constant, a part for each element and one for each of the squares (`Sizes`), in any
    unit; one that is not given grows with the elements alone. Bytes and messages are in proportion to the elements.
    """

    times: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def factors(self, sizes: Sequence[Sizes], reference: Sizes) -> Floats:
        """Factors of microbatches of these sizes where one of size `reference` has 1.

        A row for each field of `UnitFactors`, with an entry for every microbatch.
        """
        elements = np.array([size.elements for size in sizes]) / max(reference.elements, 1)
        costs = [self.times.get(name, (0.0, 1.0, 0.0)) for name in TIMES]
        return np.array([*(_times(own, sizes) / _times(own, [reference]) for own in costs), elements, elements])


def _times(parts: Sequence[float], sizes: Sequence[Sizes]) -> Floats:
    constant, linear, quadratic = parts
    elements, squares = np.array([(size.elements, size.squares) for size in sizes], np.float64).T
    return np.asarray(constant + linear * elements + quadratic * squares)


def fit_times(sizes: Sequence[Sizes], times_us: Sequence[float]) -> Floats:
    """Least-squares fit of times: their constant, linear and quadratic parts (`SizeCosts`), none of them negative.

    Times that are far off, such as those with a pause of the interpreter in them, do not count.
    """
    from scipy.optimize import nnls  # slow to load, and only for microbatches of different lengths

    columns = np.array([(1.0, size.elements, size.squares) for size in sizes])
    times = np.asarray(times_us, np.float64)
    scale = columns.max(axis=0).clip(1)
    found = nnls(columns / scale, times)[0]
    off = np.abs(columns / scale @ found - times)
    near = off <= OUTLIER * np.median(off)
    return np.asarray(nnls(columns[near] / scale, times[near])[0] / scale)


def typical(factors: Floats, microbatches: int) -> Floats:
    """Factors of so many microbatches that stand for all of these, by the quantiles of their times."""
    ranked = factors[:, np.argsort(factors[: len(TIMES)].sum(axis=0), kind="stable")]
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
