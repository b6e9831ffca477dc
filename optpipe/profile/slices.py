"""Slices of sequences as they were measured, and the parts of their times: by tokens, by attention, and fixed.

A slice runs with the keys and values of the earlier ones. Beyond its share of the whole sequence's time it takes what
an op takes whatever its length, what it costs to join keys and values, and a mask over all of the earlier positions,
where a whole causal sequence skips what lies behind each. So the parts are fitted to the times of slices, not derived
from a formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import ceil, floor
from statistics import mean
from typing import Any, NamedTuple, Self

import numpy as np

from optpipe.profile.ops import Spread
from optpipe.runtime.probe import RecomputedSizes, StageSizes
from optpipe.sequences import DECIMALS, attention_shares

EXACTLY = 1000.0
"""Weight of the time of whole sequences in a fit of slices: plans begin with it."""


@dataclass(frozen=True)
class Slicing:
    """A cut of sequences into slices on a stage: tokens, times of ops by kind, and sizes, of each slice."""

    lengths: tuple[int, ...]
    times: Sequence[Mapping[str, Spread]]
    sizes: Sequence[StageSizes]

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`."""
        times = [{kind: Spread(**spread) for kind, spread in one.items()} for one in data["times"]]
        return cls(tuple(data["lengths"]), times, tuple(map(StageSizes.from_data, data["sizes"])))

    @property
    def shares(self) -> list[Fraction]:
        """Length of each slice relative to that of a mean slice, as it stands in `slices.factors.bytes`."""
        n, sequence = len(self.lengths), sum(self.lengths)
        return [Fraction(str(round(n * length / sequence, DECIMALS))) for length in self.lengths]

    @property
    def key_value_bytes(self) -> int:
        """Keys and values of the whole sequence: the last slice's backward takes their gradients of all before it."""
        earlier = sum(self.lengths[:-1])
        return ceil(self.sizes[-1].gradients_taken_bytes * sum(self.lengths) / earlier)

    @property
    def gradient_bytes(self) -> int:
        """Gradients of a mean slice's keys and values (`stages[].slice_gradient_bytes`)."""
        return ceil(self.sizes[-1].gradients_taken_bytes / sum(self.shares[:-1]))

    def mean_times(self) -> dict[str, Spread]:
        """Times of a mean slice."""
        columns = {kind: [one[kind] for one in self.times] for kind in self.times[0]}

        def mean_spread(spreads: Sequence[Spread]) -> Spread:
            lower_us, middle_us = mean(one.lower_us for one in spreads), mean(one.median_us for one in spreads)
            return Spread(middle_us, lower_us, mean(one.upper_us for one in spreads), spreads[0].count)

        return {kind: mean_spread(spreads) for kind, spreads in columns.items()}

    def mean_sizes(self) -> StageSizes:
        """Sizes that, times the share of each slice, are no less than its own, and no more for what may leave."""

        def most(values: Iterable[int]) -> int:
            return max(ceil(value / share) for value, share in zip(values, self.shares, strict=True))

        def least(values: Iterable[int]) -> int:
            return min(floor(value / share) for value, share in zip(values, self.shares, strict=True))

        def of_mode(mode: str) -> RecomputedSizes:
            again = [asdict(sizes.recomputed[mode]) for sizes in self.sizes]
            choose = {name: least if name == "offload_bytes" else most for name in again[0]}
            return RecomputedSizes(**{name: choose[name](one[name] for one in again) for name in again[0]})

        first = self.sizes[0]
        return StageSizes(
            most(sizes.activation_bytes for sizes in self.sizes),
            most(sizes.backward_weight_bytes for sizes in self.sizes),
            least(sizes.offload_bytes for sizes in self.sizes),
            {kind: most(sizes.workspace_bytes[kind] for sizes in self.sizes) for kind in first.workspace_bytes},
            {mode: of_mode(mode) for mode in first.recomputed},
        )

    def factors(self) -> dict[str, list[float]]:
        """Factors of the slices relative to a mean one, lists of `SliceFactors` by name."""
        passes = [passes_us(one) for one in self.times]
        factors = {name.removesuffix("_us"): relative_to_mean([one[name] for one in passes]) for name in passes[0]}
        again = [kind for kind in self.times[0] if kind.startswith("C ")]  # in each mode that recomputes
        factors["recompute"] = factors["forward"]
        if again:
            factors["recompute"] = relative_to_mean([sum(one[kind].median_us for kind in again) for one in self.times])
        return factors | {"bytes": [float(share) for share in self.shares]}


def passes_us(times: Mapping[str, Spread]) -> dict[str, float]:
    """Times of F, B and W by the names that documents have for them; of a compiled stage B is all of BW.

    In tenths of a microsecond, which is finer than the noise.
    """
    backward = ("B", "W") if "B" in times else ("BW",)
    own_us = [round(times[kind].median_us, 1) for kind in ("F", *backward)]
    return dict(zip(("forward_us", "backward_input_us", "backward_weight_us"), [*own_us, 0.0], strict=False))


def relative_to_mean(values: Sequence[float]) -> list[float]:
    """Values as multiples of their mean; ones where that is 0."""
    middle = mean(values)
    return [round(value / middle, DECIMALS) if middle else 1.0 for value in values]


class LengthCosts(NamedTuple):
    """Parts of an op's times that are not in proportion to the tokens.

    `attention_us` is that of causal attention on the whole sequence; `slice_us` is what each slice takes beyond its
    share.
    """

    attention_us: float
    slice_us: float


def fit_length_costs(whole_us: float, slicings: Sequence[tuple[Sequence[int], Sequence[float]]]) -> LengthCosts:
    """Fit the parts of an op's time to those of slices, by least squares with no negative part.

    `whole_us` is its time on whole sequences, `slicings` the lengths of slices with their times. The parts of whole
    sequences add up to `whole_us`, as `optpipe.sequences.slice_times_us` has them.
    """
    from scipy.optimize import nnls  # slow to load, and only for slices

    rows, values_us = [[EXACTLY, EXACTLY, 0.0]], [EXACTLY * whole_us]
    for lengths, times_us in slicings:
        tokens = [length / sum(lengths) for length in lengths]
        rows += [[*shares, 1.0] for shares in zip(tokens, attention_shares(lengths), strict=True)]
        values_us += times_us
    _, attention_us, slice_us = nnls(np.array(rows), np.array(values_us))[0].tolist()
    return LengthCosts(min(attention_us, whole_us), slice_us)
