"""Seconds that each test file takes, by which processes that share a run begin with the longest.

So they end together: what is left at the end is short. `make durations` measures them anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import pytest

DURATIONS = Path(__file__).with_name("durations.json")


def known_s() -> dict[str, float]:
    """Seconds by file, named from the root."""
    found: dict[str, float] = json.loads(DURATIONS.read_text())
    return found


def longest_first(items: list[pytest.Item], seconds: Mapping[str, float]) -> None:
    """Put the tests of longer files before those of shorter ones; one that is not known goes amid them."""
    mean_s = fmean(seconds.values())
    items.sort(key=lambda item: (-seconds.get(file := file_of(item.nodeid), mean_s), file))


def file_of(test: str) -> str:
    """The file of a test, of its full name."""
    return test.partition("::")[0]


class Durations:
    """A plugin that sums the seconds of each file that runs, and writes them beside those of files that do not."""

    def __init__(self) -> None:
        self.measured_s: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        file = file_of(report.nodeid)
        self.measured_s[file] = self.measured_s.get(file, 0.0) + report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write all but files that are gone."""
        found = {file: round(seconds, 1) for file, seconds in (known_s() | self.measured_s).items()}
        kept = {file: found[file] for file in sorted(found) if (session.config.rootpath / file).exists()}
        DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")
