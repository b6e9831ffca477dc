"""`optpipe bench` finds regressions, records what is better, and keeps what is done when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from instances import uniform
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.components import COMPONENTS
from solver.regression.run import Suite
from solver.solve import solve
from tests.optpipe.cli.conftest import Cli

RECORDED = {"value_us": 104, "bound_us": 104, "seconds": 1.0, "time_limit_s": 30.0, "workers": 2, "version": "0.1.0"}
"""A record that two.json keeps."""


def suite_of(folder: Path, *entries: dict[str, Any], **more: Any) -> Path:
    """A suite of `entries` on two.json, p = 2 and m = 3 with a budget that 1F1B keeps."""
    (folder / "two.json").write_text(uniform(2, 3, budget=4, name="two").to_json())
    path = folder / "suite.json"
    entries = tuple({"problem": "two.json"} | entry for entry in entries)
    path.write_text(Suite.from_data({"format": "optpipe.suite/1", "entries": list(entries), **more}).to_text())
    return path


def test_nothing_has_changed(cli: Cli, tmp_path: Path) -> None:
    run = cli("bench", suite_of(tmp_path, {"recorded": RECORDED}))
    assert run.code == 0
    assert "same, proved" in run.out
    assert "1 runs: 1 same" in run.out
    assert "1/1  two  auto  104.0 µs, gap 0.00 %" in run.err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_regression_is_exit_code_1(cli: Cli, tmp_path: Path, as_json: bool) -> None:
    suite = suite_of(tmp_path, {"recorded": RECORDED | {"value_us": 100, "bound_us": 90}}, {"microbatches": 2})
    run = cli("bench", suite, *["--json"] * as_json)
    assert run.code == 1
    if as_json:
        first, second = run.document["results"]
        assert (first["verdict"], first["value_us"], first["recorded"]["value_us"]) == ("regression", 104, 100)
        assert first["curve"][-1][1:3] == [104, 104]
        assert (second["instance"], second["verdict"], second["change"]) == ("two, m 2", "new", None)
        assert run.document["regressions"] == 1
    else:
        assert "REGRESSION" in run.out
        assert "regression: two with auto: bound_us is 104, above the recorded value_us 100" in run.out


def test_record_writes_what_is_better(cli: Cli, tmp_path: Path) -> None:
    worse = RECORDED | {"value_us": 110, "bound_us": 90}
    known = RECORDED | {"found_by": "zb-h1"}
    suite = suite_of(tmp_path, {"recorded": worse}, {"microbatches": 2}, {"microbatches": 3, "recorded": known})
    before = suite.read_text()
    assert cli("bench", suite).code == 0
    assert suite.read_text() == before
    run = cli("bench", suite, "--record", "--time-limit", "20", "--workers", "1")
    assert "2 results recorded" in run.out
    entries = Suite.load(suite).entries
    records = [entry.recorded for entry in entries]
    assert records[0]
    assert records[1]
    assert (records[0].value_us, records[0].bound_us, records[0].time_limit_s, records[0].workers) == (104, 104, 20, 1)
    assert records[1].proved
    assert (records[0].found_by, records[0].proved_by) == (records[1].found_by, records[1].proved_by)
    assert records[0].found_by in COMPONENTS["start"]
    assert records[0].proved_by in COMPONENTS["bound"]
    assert records[2]
    assert records[2].to_data() == known
    again = cli("bench", suite, "--json")
    assert [result["verdict"] for result in again.document["results"]] == ["same"] * 3


def test_methods_side_by_side_with_a_plot(cli: Cli, tmp_path: Path) -> None:
    picture = tmp_path / "curves.svg"
    suite = suite_of(tmp_path, {"recorded": RECORDED}, {"microbatches": 2})
    run = cli("bench", suite, "--methods", "gpipe,1f1b", "--only", "two", "--plot", picture, "--json")
    rows = {row["method"]: row for row in run.document["results"]}
    assert list(rows) == ["gpipe", "1f1b"]
    assert "its budget is 4" in rows["gpipe"]["why_not"]
    assert rows["1f1b"]["verdict"] == "new"
    assert "best value over time" in picture.read_text()


def test_counted_work_without_parts(cli: Cli, tmp_path: Path) -> None:
    options = ("--deterministic-limit", "0.1", "--without", "1f1b,chain", "--json")
    run = cli("bench", suite_of(tmp_path, {}), *options)
    assert (run.document["deterministic_limit"], run.document["without"]) == (0.1, ["1f1b", "chain"])
    assert run.document["time_limit_s"] is None
    [result] = run.document["results"]
    assert {result["found_by"], result["proved_by"]}.isdisjoint({"1f1b", "chain"})
    assert result["status"] == "optimal"


def test_no_schedule_is_no_picture(cli: Cli, tmp_path: Path) -> None:
    picture = tmp_path / "curves.svg"
    run = cli("bench", suite_of(tmp_path, {}), "--methods", "gpipe", "--plot", picture)
    assert run.code == 0
    assert "1 runs: 1 no schedule" in run.out
    assert "curves.svg is not drawn" in run.err
    assert not picture.exists()


def test_public_values_are_a_limit_where_the_suite_says_so(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "reference.json").write_text(json.dumps({"two": {"zb_v_us": 100}}))
    suite = suite_of(tmp_path, {"method": "1f1b"}, reference="reference.json", never_above_public=True)
    run = cli("bench", suite)
    assert run.code == 1
    assert "above the 100 of a public schedule (ZB-V)" in run.out
    assert "1f1b: above the best public value on 1 of 1 instances" in run.out


def test_wrong_use(cli: Cli, tmp_path: Path) -> None:
    suite = suite_of(tmp_path, {})
    for arguments, message in (
        (
            ("no-such",),
            "the named suites are: budgets, four-by-eight, large, published, recomputation, slices, small. Maybe",
        ),
        ((tmp_path / "two.json",), "is a problem but a suite is needed. Maybe"),
        ((tmp_path / "none.json",), "cannot be read: No such file"),
        ((suite, "--methods", "zb-9"), "method is 'zb-9'; the methods are auto"),
        ((suite, "--only", "x*"), "only is 'x*', which matches no instance. Maybe one such as 'two'"),
        ((suite, "--plot", tmp_path / "p.bmp"), ".bmp"),
        ((suite, "--plot", tmp_path / "no" / "p.png"), "is not a folder"),
        ((suite, "--force"), "--force is given without --record"),
        ((suite, "--without", "serch"), "--without names 'serch'; there are search,"),
        ((suite, "--without", "states", "--record"), "--without is given with --record"),
        ((suite, "--deterministic-limit", "1", "--workers", "2"), "counts the work of one thread"),
        ((suite, "--time-limit", "0"), "'--time-limit'"),
    ):
        run = cli("bench", *arguments)
        assert run.code == 2, arguments
        assert message in run.err
        assert "Traceback" not in run.err


def test_ctrl_c_prints_what_is_done(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that it stops keeps its best schedule; those behind it are not begun."""

    def interrupted(problem: Problem, *arguments: Any) -> Schedule:
        if problem.microbatches == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return solve(problem, *arguments)

    monkeypatch.setattr(sys.modules["solver.solve"], "solve", interrupted)
    stopped = {"microbatches": 2, "method": "1f1b"}
    run = cli("bench", suite_of(tmp_path, {"recorded": RECORDED}, stopped, {"microbatches": 4}), "--json")
    assert run.code == 130
    assert "1/3  two" in run.err
    assert "Traceback" not in run.err
    assert run.document["interrupted"] is True
    assert [result["verdict"] for result in run.document["results"]] == ["same", "interrupted"]
    assert run.document["results"][1]["value_us"] >= run.document["results"][1]["bound_us"]
