"""The tables of suites show what is recorded, and say what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import suites
from instances import uniform

RECORD = {"bound_us": 300.0, "seconds": 1.25, "time_limit_s": 5.0, "workers": 2, "version": "0"}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The table of a suite with three instances: one proved, one better than the public value, one not recorded."""
    entries: list[dict[str, Any]] = []
    public = {}
    for m, record in ((4, {**RECORD, "value_us": 300.0}), (8, {**RECORD, "value_us": 480.0}), (16, None)):
        (tmp_path / f"m{m}.json").write_text(json.dumps(uniform(2, m, budget=4).to_data()))
        entries.append({"problem": f"m{m}.json"} | ({"recorded": record} if record else {}))
    public["m8"] = {"best_public": {"scheduler": "theirs", "value_us": 500.0}}
    (tmp_path / "reference.json").write_text(json.dumps(public))
    suite = {"format": "optpipe.suite/1", "reference": "reference.json", "entries": entries}
    (tmp_path / "three.json").write_text(json.dumps(suite))
    monkeypatch.setattr(suites, "SUITES", tmp_path)
    return suites._table_of_records("three", "full", tmp_path)


def test_rows_are_the_records(measured: str) -> None:
    assert "| m4 | 300 | 0.00 % | 60.00 % | - | - | - | 1.25 | 5 |" in measured
    assert "| m8 | 480 | 37.50 % | 50.00 % | 500 | 52.00 % | theirs | 1.25 | 5 |" in measured


def test_the_summary_counts(measured: str) -> None:
    assert "1 of 2 are proved optimal." in measured
    assert "Above the best public value on 0 of the 1 instances that have one" in measured
    assert "mean bubble 50.00 % against 52.00 %" in measured
    assert "Not recorded yet: m16." in measured
