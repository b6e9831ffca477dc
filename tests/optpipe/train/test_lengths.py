"""Sizes of microbatches, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optpipe.errors import InputError
from optpipe.train import ModelConfig
from optpipe.train.lengths import (
    MEDIAN,
    DrawnLengths,
    SizeCosts,
    Sizes,
    fit_times,
    step_generator,
    tokens_of,
    typical,
    varied_samples,
)

LONGEST, MANY = 1000, 4000


def drawn(seed: int = 0, step: int = 0, count: int = MANY, **settings: Any) -> list[int]:
    lengths = DrawnLengths(ModelConfig("tiny", lengths="varying", **settings), LONGEST)
    return lengths.draw(step, count, step_generator(seed, step))


def test_log_normal_lengths_have_their_median_and_no_short_ones() -> None:
    lengths = drawn()
    assert np.median(lengths) == pytest.approx(MEDIAN * LONGEST, rel=0.05)
    assert min(lengths) == round(MEDIAN * MEDIAN * LONGEST)
    assert max(lengths) == LONGEST


def test_bimodal_lengths_are_short_or_eight_times_as_long() -> None:
    lengths = np.array(drawn(length_distribution="bimodal"))
    long = lengths > 300
    assert np.mean(long) == pytest.approx(0.25, abs=0.03)
    assert np.median(lengths[long]) / np.median(lengths[~long]) == pytest.approx(8, rel=0.05)
    assert not ((lengths > 200) & (lengths < 300)).any(), "they are apart"


def test_lengths_of_a_file_are_drawn_by_how_often_they_are_there(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("7\n7 900\n7\n")  # a line for each microbatch, with its documents
    lengths = drawn(length_file=path)
    assert set(lengths) == {7, 900}
    assert np.mean(np.array(lengths) == 7) == pytest.approx(0.75, abs=0.03)
    path.write_text("[7, 1001]")
    with pytest.raises(
        InputError, match=r"model\.length_file holds a length of 1,001, but sequences have at most 1,000"
    ):
        drawn(length_file=path)


@pytest.mark.parametrize("distribution", ["log-normal", "bimodal"])
def test_a_seed_of_their_own_keeps_lengths_from_run_to_run(distribution: str) -> None:
    def of(seed: int, step: int, length_seed: int | None) -> list[int]:
        return drawn(seed, step, 8, length_distribution=distribution, length_seed=length_seed)

    assert of(0, 3, 5) == of(1, 3, 5)
    assert of(0, 3, 5) != of(0, 4, 5) != of(0, 4, 6)
    assert of(0, 3, None) == of(0, 3, None) != of(1, 3, None)


def test_draws_are_told_apart_and_old_runs_go_on(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("3\n4\n")
    settings: list[dict[str, Any]] = [{}, {"length_distribution": "bimodal"}, {"length_file": path}, {"length_seed": 0}]
    identities = [DrawnLengths(ModelConfig("tiny", lengths="varying", **one), 32).identity() for one in settings]
    assert identities[0] == {}, "checkpoints of before there was a choice"
    assert len({str(identity) for identity in identities}) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length_seed": 1}, r"length_seed is '1', but lengths is 'equal'\. Maybe 'varying'"),
        (
            {"lengths": "varying", "name": "a:b", "data": "a:c", "length_distribution": "bimodal"},
            "length_distribution is 'bimodal', but a:c decides the lengths",
        ),
        (
            {"lengths": "varying", "length_file": Path("x.txt"), "length_distribution": "bimodal"},
            "length_file is 'x.txt', but length_distribution is 'bimodal'",
        ),
    ],
)
def test_settings_of_draws_that_do_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelConfig(**{"name": "tiny", **settings})


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
    costs, sizes = SizeCosts({"forward": (3, 2, 1)}), [Sizes(4, 1), Sizes(8, 1)]
    forward, *others = costs.factors(sizes, Sizes(4, 1)).tolist()
    assert forward == [1, (3 + 16 + 64) / (3 + 8 + 16)]
    assert others == [[1, 2]] * 6


def test_typical_microbatches_are_quantiles() -> None:
    factors = np.array([[5.0, 1, 3, 2, 4, 6]] * 7)
    assert typical(factors, 3)[0].tolist() == [2, 4, 6]
    assert typical(factors[:, :2], 4)[-1].tolist() == [1, 1, 5, 5]
