"""Records are replaced as a whole, by better runs alone unless forced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from solver.bench.cases import cases_of
from solver.bench.judge import Result, judge
from solver.bench.measure import Measured
from solver.bench.record import with_records
from solver.bench.suite import Suite
from solver.limits import Limits
from tests.solver.bench.suites import RECORDED, figures, measured, write_suite

LIMITS = Limits(10, workers=1)


def recorded(folder: Path, entry: dict[str, Any], run: Measured, force: bool = False) -> tuple[Any, int]:
    """What is recorded of an entry after a run, and how many records were written."""
    path = write_suite(folder, entry, {"method": "cp-sat"})
    suite = Suite.load(path)
    case = cases_of(path, suite)[0]
    changed, count = with_records(suite, [Result(case, run, judge(case, run, LIMITS))], LIMITS, force)
    assert changed.entries[1].recorded is None
    return changed.entries[0].to_data().get("recorded"), count


@pytest.mark.parametrize("old", [None, {"value_us": 110}, {"bound_us": 90}])
def test_better_runs_are_recorded_as_a_whole(tmp_path: Path, old: dict[str, Any] | None) -> None:
    entry = {} if old is None else {"recorded": RECORDED | old}
    record, count = recorded(tmp_path, entry, measured(figures(95)))
    assert count == 1
    assert {key: record[key] for key in ("value_us", "bound_us", "seconds", "time_limit_s", "workers")} == {
        "value_us": 104,
        "bound_us": 95,
        "seconds": 1.0,
        "time_limit_s": 10.0,
        "workers": 1,
    }


@pytest.mark.parametrize(
    ("old", "run", "forced"),
    [
        ({"value_us": 103}, measured(figures(95)), True),
        ({}, measured(figures(100)), True),
        ({"value_us": 120, "bound_us": 110}, measured(figures(100)), True),
        ({"value_us": 110}, measured(figures(95), interrupted=True), False),
        ({}, measured(None, why_not="too tight"), False),
    ],
    ids=["worse", "same", "contradiction", "interrupted", "no schedule"],
)
def test_others_are_not(tmp_path: Path, old: dict[str, Any], run: Measured, forced: bool) -> None:
    record = RECORDED | old
    assert recorded(tmp_path, {"recorded": record}, run) == (record, 0)
    assert recorded(tmp_path, {"recorded": record}, run, force=True)[1] == forced
