"""Calibration: efficiencies that are found again, and tables that no efficiencies explain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import lsq_linear

from optpipe.cluster.calibrate import calibrate, fit, predict, split_rows, work_of
from optpipe.cluster.machine import DEFAULT_EFFICIENCIES, Efficiencies, Machine, named_machines
from optpipe.cluster.rows import Row, read_rows
from optpipe.errors import InputError

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published"


@pytest.fixture(scope="module")
def b200() -> list[Row]:
    rows = read_rows(PUBLISHED / "steps.csv", PUBLISHED / "models.json")[0]
    return [row for row in split_rows(named_machines()["b200"], rows)[0] if row.seconds]


@pytest.fixture
def bare() -> Machine:
    return named_machines()["b200"].model_copy(update={"efficiencies": []})


def timed(machine: Machine, rows: list[Row], truth: Efficiencies, noise: Callable[[int], float]) -> list[Row]:
    """Rows with the times of given efficiencies."""
    return [
        replace(row, seconds=float(work_of(machine, row, truth.slowdowns) @ truth.slowdowns) * noise(k), software="")
        for k, row in enumerate(rows)
    ]


def test_efficiencies_that_made_the_times_are_found_again(bare: Machine, b200: list[Row]) -> None:
    truth = DEFAULT_EFFICIENCIES.model_copy(update={"products": 0.6, "attention": 0.3, "experts": 0.4})
    rows = timed(bare, b200, truth, lambda _: 1.0)
    found = calibrate(bare, rows, leave_out=False)
    assert max(abs(predict(found, row).error) for row in rows) < 0.01
    own = found.efficiencies_of("bf16")
    assert (own.products, own.attention) == (pytest.approx(0.6, rel=0.1), pytest.approx(0.3, rel=0.2))
    assert (own.rows, own.software) == (sum(row.strategy.precision == "bf16" for row in rows), "")


def test_an_outlier_moves_little(bare: Machine, b200: list[Row]) -> None:
    rows = timed(bare, b200, DEFAULT_EFFICIENCIES, lambda k: 5.0 if k == 3 else 1.0)
    found = calibrate(bare, rows, leave_out=False)
    errors = [abs(predict(found, row).error) for k, row in enumerate(rows) if k != 3]
    assert np.median(errors) < 0.01


def test_too_few_rows_are_refused(bare: Machine, b200: list[Row]) -> None:
    with pytest.raises(InputError, match=r"has 3 rows of b200 with a time, but \d+ kinds of work occur in them"):
        calibrate(bare, b200[:3])


def test_shuffled_times_are_refused(bare: Machine, b200: list[Row]) -> None:
    order = np.random.default_rng(0).permutation(len(b200))
    shuffled = [replace(row, seconds=b200[k].seconds) for row, k in zip(b200, order, strict=True)]
    with pytest.raises(InputError, match="Maybe the columns of times and layouts are mixed up"):
        calibrate(bare, shuffled, leave_out=False)


def test_no_warning_is_printed_of_a_division_within_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It divides by a step of zero on a few rows of mixed-up times; in tests a warning is an error."""

    def divides(*arguments: Any, **options: Any) -> Any:
        assert np.isinf(np.ones(1) / np.zeros(1)).all()
        return lsq_linear(*arguments, **options)

    monkeypatch.setattr("optpipe.cluster.calibrate.lsq_linear", divides)
    prior = DEFAULT_EFFICIENCIES.slowdowns
    works = np.eye(len(prior))
    assert fit(works, works @ prior, prior, 1.0) == pytest.approx(prior)


def test_a_user_calibrates_what_ships_further(b200: list[Row]) -> None:
    """A few own rows move the shipped efficiencies, and those of other software stay."""
    shipped = named_machines()["b200"]
    rows = [replace(row, seconds=(row.seconds or 0) * 1.2, software="ours") for row in b200[:15]]
    found = calibrate(shipped, rows, leave_out=False)
    assert np.median([abs(predict(found, row).error) for row in rows]) < 0.03
    kept = {one.software for one in shipped.efficiencies} - {""}
    assert kept < {one.software for one in found.efficiencies}


def test_what_ships_has_seen_no_model_that_is_left_out(bare: Machine, b200: list[Row]) -> None:
    """Rows that the shipped efficiencies were fitted to: their error is that of a fit without anything before."""
    errors = [
        [
            (one.software, one.precision, one.unseen_model_error)
            for one in calibrate(machine, b200).efficiencies
            if one.rows
        ]
        for machine in (named_machines()["b200"], bare)
    ]
    assert errors[0][: len(errors[1])] == errors[1]


def test_rows_of_other_machines_are_told_apart(b200: list[Row]) -> None:
    rows = [replace(b200[0], machine="h100", name="a"), replace(b200[1], machine="", name="b"), b200[2]]
    mine, others = split_rows(named_machines()["b200"], rows)
    assert [row.name for row in mine] == [b200[2].name]
    assert {one.name: one.reason for one in others} == {"a": "was measured on h100", "b": "does not name its machine"}
    unnamed = [replace(row, machine="") for row in rows]
    assert len(split_rows(named_machines()["b200"], unnamed)[0]) == 3
