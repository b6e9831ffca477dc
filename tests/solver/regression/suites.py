"""Suites, cases and runs for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from instances import uniform
from solver.build import build_schedule
from solver.published.one_stage import zb_h1
from solver.regression.run import Case, Entry, Figures, MeasuredRun, Point, Public, Suite

PROBLEM = uniform(2, 3, budget=4, name="two")

RECORDED = {"value_us": 104, "bound_us": 100, "seconds": 2.0, "time_limit_s": 30.0, "workers": 2, "version": "0.1.0"}
"""A record that the schedule of these tests repeats: its value is 104."""


def figures(bound_us: float = 0.0) -> Figures:
    """ZB-H1 on PROBLEM, found in a second, with a bound of one's choice."""
    return Figures.of(build_schedule(PROBLEM, zb_h1(PROBLEM), bound_us, "zb-h1", 1.0))


def measured(found: Figures | None, **more: Any) -> MeasuredRun:
    """A run that took a second."""
    curve = (Point(1.0, found.value_us, found.bound_us, "zb-h1"),) if found else ()
    given = {"figures": found, "why_not": "", "failed": False, "seconds": 1.0, "interrupted": False, "curve": curve}
    return MeasuredRun(**(given | more))


def case(recorded: dict[str, Any] | None = None, tolerance: float = 0.0, public_us: float | None = None) -> Case:
    """An entry for PROBLEM; it must not be above `public_us`."""
    entry = Entry.from_data(
        {"problem": "two.json", "tolerance": tolerance} | ({"recorded": recorded} if recorded else {})
    )
    public = None if public_us is None else Public(public_us, "someone's")
    return Case("two", PROBLEM, "auto", entry, public, never_above_public=True)


def write_suite(folder: Path, *entries: dict[str, Any], **more: Any) -> Path:
    """A suite of `entries` on two.json, which lies beside it."""
    (folder / "two.json").write_text(PROBLEM.to_json())
    path = folder / "suite.json"
    data = {"format": "optpipe.suite/1", "entries": [{"problem": "two.json"} | entry for entry in entries], **more}
    path.write_text(Suite.from_data(data).to_text())
    return path
