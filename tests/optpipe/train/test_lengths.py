"""Sizes of microbatches, and what they cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optpipe.train.lengths import SizeCosts, Sizes, fit_times, tokens_of, typical, varied_samples


def test_sizes_are_those_of_the_largest_tensor() -> None:
    packed = {"ends": torch.zeros(3), "ids": torch.zeros(1, 40)}
    assert Sizes.of(packed) == Sizes(40, 1)
    assert Sizes.of(torch.zeros(4, 10)).squares == 4 * 10**2
    assert Sizes.of(torch.zeros(5)) == Sizes(5, 1)


def test_tokens_are_integers_or_rows() -> None:
    assert tokens_of(torch.zeros(2, 7, dtype=torch.int64)) == 14
    assert tokens_of(torch.zeros(2, 7, 3)) == 14
    assert tokens_of(torch.zeros(5, 8)) == 5


def test_samples_reach_from_the_shortest_to_the_longest() -> None:
    inputs = [torch.zeros(1, n) for n in (9, 2, 5, 7, 3, 8)]
    assert [len(x[0]) for x in varied_samples(inputs)] == [2, 3, 7, 9]
    assert len(varied_samples([*inputs[:1], None])) == 1


def test_a_pause_in_one_of_the_ops_does_not_change_the_fit() -> None:
    sizes = [Sizes(2 * n, 2) for n in range(1, 21)]
    times = [10 + 3 * size.elements + 0.5 * size.squares for size in sizes]
    times[4] += 5000
    assert fit_times(sizes, times) == pytest.approx([10, 3, 0.5], rel=1e-6)


def test_no_part_of_a_fit_is_negative() -> None:
    sizes = [Sizes(n, 1) for n in (1, 2, 3, 4)]
    assert (fit_times(sizes, [4.0, 3.0, 2.0, 1.0]) >= 0).all()


def test_factors_are_1_at_the_reference() -> None:
    costs, sizes = SizeCosts(linear=2, quadratic=1, constant=3), [Sizes(4, 1), Sizes(8, 1)]
    time, size, transfer = costs.factors(sizes, Sizes(4, 1)).tolist()
    assert time == [1, (3 + 16 + 64) / (3 + 8 + 16)]
    assert size == transfer == [1, 2]


def test_typical_microbatches_are_quantiles() -> None:
    factors = np.array([[5.0, 1, 3, 2, 4, 6]] * 3)
    assert typical(factors, 3)[0].tolist() == [2, 4, 6]
    assert typical(factors[:, :2], 4)[1].tolist() == [1, 1, 5, 5]
