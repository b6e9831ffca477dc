"""Regressions, told from noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from solver.limits import Limits
from solver.regression.judge import Result, judge, with_records
from solver.regression.run import MeasuredRun, Suite, expand_cases
from tests.solver.regression.suites import RECORDED, case, figures, measured, write_suite

LIMITS = Limits(30, workers=2)


def verdict(recorded: dict[str, Any] | None, bound_us: float = 100, tolerance: float = 0.0, **more: Any) -> Any:
    found = measured(figures(bound_us))
    old = None if recorded is None else RECORDED | recorded
    return judge(case(old, tolerance), found, LIMITS, **more)


@pytest.mark.parametrize(
    ("recorded", "bound_us", "tolerance", "change"),
    [
        (None, 100, 0.0, "new"),
        ({}, 100, 0.0, "same"),
        ({}, 101, 0.0, "better"),
        ({"value_us": 110}, 90, 0.1, "better"),
        ({"value_us": 103}, 100, 0.01, "same"),
        ({"bound_us": 100.5}, 100, 0.01, "same"),
        ({"value_us": 104 * (1 + 1e-12)}, 100, 0.0, "same"),
        ({"bound_us": 104}, 104, 0.0, "same"),
    ],
)
def test_no_regression(recorded: dict[str, Any] | None, bound_us: float, tolerance: float, change: str) -> None:
    found = verdict(recorded, bound_us, tolerance)
    assert (found.change, found.findings, found.contradiction) == (change, (), False)


@pytest.mark.parametrize(
    ("recorded", "bound_us", "tolerance", "finding"),
    [
        ({"value_us": 103}, 100, 0.0, "the value is 104.0 µs, 0.97 % above the recorded 103.0 µs (tolerance 0.00 %)."),
        ({"value_us": 100, "bound_us": 90}, 100, 0.01, "the value is 104.0 µs, 4.00 % above the recorded 100.0 µs"),
        ({"bound_us": 102}, 100, 0.0, "the bound is 100.0 µs, 1.96 % below the recorded 102.0 µs"),
        ({"bound_us": 104}, 103.9, 0.5, "a proof is lost: 104.0 µs was proved optimal in 2.00 s."),
    ],
)
def test_regressions(recorded: dict[str, Any], bound_us: float, tolerance: float, finding: str) -> None:
    found = verdict(recorded, bound_us, tolerance)
    assert found.change == "regression"
    [text] = found.findings
    assert text.startswith(finding)
    assert not found.contradiction


def test_contradictions_are_told_with_all_their_digits() -> None:
    found = measured(replace(figures(), value_us=1152599, bound_us=1152599))
    recorded = RECORDED | {"value_us": 1152601, "bound_us": 1152600}
    [text] = judge(case(recorded), found, LIMITS).findings
    assert text.startswith("value_us is 1152599, below the recorded bound_us 1152600:")


def test_a_run_with_less_time_or_fewer_cores_says_so() -> None:
    [text] = verdict({"value_us": 103, "time_limit_s": 60.0}).findings
    assert text.endswith("Maybe the time: 60 s when recorded, 30 s now.")
    [text] = verdict({"value_us": 103, "workers": 16}).findings
    assert text.endswith("Maybe the cores: 16 when recorded, 2 now.")


@pytest.mark.parametrize(
    ("recorded", "bound_us", "words"),
    [
        ({"value_us": 120, "bound_us": 110}, 100, "value_us is 104, below the recorded bound_us 110"),
        ({"value_us": 103, "bound_us": 103}, 104, "bound_us is 104, above the recorded value_us 103"),
    ],
)
def test_a_bound_above_a_value_is_a_contradiction(recorded: dict[str, Any], bound_us: float, words: str) -> None:
    found = verdict(recorded, bound_us)
    assert (found.change, found.contradiction) == ("regression", True)
    assert found.findings[0].startswith(words)


def test_seconds_fail_only_when_asked() -> None:
    """The run took 1 s; less than half a second counts as half a second."""
    recorded = {"seconds": 0.01, "bound_us": 104}
    assert verdict(recorded, 104).slow is False
    assert verdict(recorded, 104, seconds_ratio=2.5).change == "same"
    late = verdict(recorded, 104, seconds_ratio=1.5)
    assert late.change == "regression"
    assert "took 1.00 s, more than 1.5 times the recorded 0.01 s. Maybe" in late.findings[0]


def test_a_slow_proof_is_pointed_out() -> None:
    found = measured(replace(figures(104), seconds=7.0))
    proved, unproved = RECORDED | {"bound_us": 104}, RECORDED
    assert [judge(case(recorded), found, LIMITS).slow for recorded in (proved, unproved)] == [True, False]
    assert judge(case(proved), found, LIMITS).change == "same"


def test_above_what_is_public() -> None:
    found = measured(figures())
    assert judge(case(public_us=104), found, LIMITS).change == "new"
    worse = judge(case(public_us=100), found, LIMITS)
    assert worse.change == "regression"
    assert worse.findings == ("value_us is 104, 4.00% above the 100 of a public schedule (someone's).",)


def test_no_schedule() -> None:
    none = measured(None, why_not="too tight")
    assert judge(case(), none, LIMITS).change == "no schedule"
    assert judge(case(RECORDED), none, LIMITS).findings == ("no schedule, but one was recorded: too tight",)
    assert judge(case(), measured(None, why_not="a bug", failed=True), LIMITS).change == "regression"


def test_an_interrupted_run_is_not_judged() -> None:
    found = judge(case(RECORDED | {"value_us": 103}), measured(figures(), interrupted=True), LIMITS)
    assert (found.change, found.findings) == ("interrupted", ())


RECORD_LIMITS = Limits(10, workers=1)


def recorded(folder: Path, entry: dict[str, Any], run: MeasuredRun, force: bool = False) -> tuple[Any, int]:
    """Record of an entry after a run, and the number of records written."""
    path = write_suite(folder, entry, {"method": "cp-sat"})
    suite = Suite.load(path)
    case = expand_cases(path, suite)[0]
    changed, count = with_records(suite, [Result(case, run, judge(case, run, RECORD_LIMITS))], RECORD_LIMITS, force)
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


def test_a_run_as_good_is_recorded_where_nobody_knows_what_found_the_value(tmp_path: Path) -> None:
    record, count = recorded(tmp_path, {"recorded": RECORDED}, measured(figures(100)))
    assert (record["found_by"], count) == ("zb-h1", 1)


@pytest.mark.parametrize(
    ("old", "run", "forced"),
    [
        ({"value_us": 103}, measured(figures(95)), True),
        ({"found_by": "lists"}, measured(figures(100)), True),
        ({"value_us": 120, "bound_us": 110}, measured(figures(100)), True),
        ({"value_us": 110}, measured(figures(95), interrupted=True), False),
        ({}, measured(None, why_not="too tight"), False),
    ],
    ids=["worse", "same", "contradiction", "interrupted", "no schedule"],
)
def test_others_are_not(tmp_path: Path, old: dict[str, Any], run: MeasuredRun, forced: bool) -> None:
    record = RECORDED | old
    assert recorded(tmp_path, {"recorded": record}, run) == (record, 0)
    assert recorded(tmp_path, {"recorded": record}, run, force=True)[1] == forced
