"""The order of the tests: files that take long come first, by seconds that are of these files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import durations

ROOT = Path(__file__).parents[1]


def test_the_seconds_are_those_of_the_files_that_there_are() -> None:
    known, files = durations.known_s().keys(), {str(p.relative_to(ROOT)) for p in ROOT.glob("tests/**/test_*.py")}
    assert known <= files, "Maybe measure them anew (make durations)."
    assert len(known) > 0.8 * len(files), "Maybe measure them anew (make durations)."


def test_longer_files_come_first_and_a_file_stays_together() -> None:
    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid = nodeid

    items = [Item(name) for name in ("short::a", "long::b", "new::c", "long::a", "short::b", "new::a")]
    durations.longest_first(items, {"short": 1, "long": 9})  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == ["long::b", "long::a", "new::c", "new::a", "short::a", "short::b"]


def test_what_runs_is_measured_and_what_is_gone_is_left_out(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durations, "DURATIONS", tmp_path / "durations.json")
    durations.DURATIONS.write_text('{"tests/gone.py": 5.0, "tests/conftest.py": 2.0, "tests/test_durations.py": 7.0}')
    plugin = durations.Durations()
    for seconds in (0.25, 0.5, 0.25):
        name, place = request.node.nodeid, request.node.location
        plugin.pytest_runtest_logreport(
            pytest.TestReport(name, place, {}, "passed", None, "call", duration=seconds)  # type: ignore[arg-type]
        )
    plugin.pytest_sessionfinish(request.session)
    assert durations.known_s() == {"tests/conftest.py": 2.0, "tests/test_durations.py": 1.0}
