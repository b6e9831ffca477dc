"""Pictures fit a notebook: small enough, and without reach beyond themselves."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from optpipe.notebook import SideBySide, html_of
from optpipe.notebook.pictures import MOST_BYTES, MOST_OPS, picture_of
from optpipe.schedule import Schedule
from solver.limits import Limits
from solver.portfolio import solve
from tests.problems import uniform

CAP_BYTES = 2_000_000


def scheduled(devices: int, microbatches: int, method: str = "zb-h1") -> Schedule:
    return solve(uniform(devices, microbatches), method, Limits(time_limit_s=10.0))


def ops_of(schedule: Schedule) -> int:
    return sum(len(stream) for device in schedule.devices for _, stream in device.streams())


def test_the_largest_picture_is_within_the_cap() -> None:
    schedule = scheduled(24, 55)
    assert 0.98 * MOST_OPS <= ops_of(schedule) <= MOST_OPS
    page = html_of(schedule)
    assert "<svg" in page
    assert len(page.encode()) <= CAP_BYTES


def test_a_larger_schedule_says_how_to_draw_it() -> None:
    schedule = scheduled(24, 60)
    page = html_of(schedule)
    assert "<svg" not in page
    assert f"A picture of {ops_of(schedule):,} ops is too large for a notebook" in page
    assert "draw_schedule" in page
    assert "device 23" in page
    assert len(page.encode()) < 50_000


def test_several_count_together() -> None:
    half = scheduled(24, 30)
    assert "<svg" in picture_of(SideBySide({"one": half}))
    assert "<svg" not in picture_of(SideBySide({"one": half, "other": half}))


def test_a_picture_beyond_the_bytes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = scheduled(2, 3)
    monkeypatch.setattr("optpipe.notebook.pictures.MOST_BYTES", 1000)
    assert "too large" in picture_of(schedule)
    assert MOST_BYTES < CAP_BYTES


def test_a_picture_reaches_nothing_but_itself() -> None:
    picture = picture_of(scheduled(2, 3))
    ElementTree.fromstring(picture)
    assert "<style" not in picture
    assert "<metadata" not in picture
    referred = set(re.findall(r"""(?:url\(|href=")#([^")]+)""", picture))
    assert set(re.findall(r' id="([^"]+)"', picture)) == referred


def test_objects_without_a_picture_have_none() -> None:
    assert picture_of(uniform(2, 3)) == ""
