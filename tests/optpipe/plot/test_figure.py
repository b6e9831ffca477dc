"""Files: the suffix decides, bytes repeat, names are text and never markup, the caller's settings stay."""

from __future__ import annotations

import re
import struct
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

from instances import uniform
from optpipe.errors import InputError
from optpipe.plot import draw_schedule, render_comparison, render_schedule
from optpipe.plot.figure import FORMATS, MOST_PIXELS, encode, settings
from optpipe.plot.gantt import schedule_panel
from tests.optpipe.plot.schedules import all_forwards_first, pair

TEXT = "{http://www.w3.org/2000/svg}text"


BEGINS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF", "html": b"<!DOCTYPE html>"}


@pytest.mark.parametrize("picture_format", FORMATS)
def test_the_suffix_decides_the_format_and_the_same_schedule_gives_the_same_bytes(
    picture_format: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a.{picture_format.upper()}"
    draw_schedule(pair(), path)
    assert path.read_bytes().startswith(BEGINS[picture_format])
    assert render_schedule(pair(), picture_format) == path.read_bytes()


def test_a_picture_replaces_the_old_file_in_one_step(tmp_path: Path) -> None:
    """A second name of the old file keeps its content: nothing was written into it."""
    path, old = tmp_path / "schedule.svg", tmp_path / "old.svg"
    path.write_text("old")
    old.hardlink_to(path)
    draw_schedule(pair(), path)
    assert path.read_bytes().startswith(b"<?xml")
    assert old.read_text() == "old"


@pytest.mark.parametrize("name", ["plan.gif", "plan"])
def test_another_suffix_is_refused_with_the_allowed_ones(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.png, \.svg, \.pdf, \.html\. Maybe name it .*plan\.svg\.") as caught:
        draw_schedule(pair(), tmp_path / name)
    assert repr(Path(name).suffix) in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("render", [render_schedule, lambda one, *how: render_comparison([("mine", one)], *how)])
def test_a_picture_for_print_has_its_width_embedded_fonts_and_no_title(render: Callable[..., bytes]) -> None:
    pdf = render(pair(), "pdf", 3.3)
    assert re.search(rb"/MediaBox \[ 0 0 237\.6\d* ", pdf), "3.3 inches of 72 points"
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    root = ElementTree.fromstring(render(pair(), "svg", 3.3))
    texts = {"".join(text.itertext()) for text in root.iter(TEXT)}
    assert {"F", "B", "time (µs)"} <= texts
    assert not any("microbatches" in text for text in texts)


PLAIN = "<script>alert(1)</script> $x^2$ and \\alpha & $ ]]> --> 調度 "


def test_names_are_text() -> None:
    devices = [{"memory_bytes": 100, "name": PLAIN[:12]}, {"memory_bytes": None, "name": PLAIN[26:38]}]
    schedule = pair(name=PLAIN + "line\none\u0000\u0008\u202etwo", devices=devices)
    root = ElementTree.fromstring(render_schedule(schedule, "svg"))
    assert f"{PLAIN}line one two: 2 devices, 4 microbatches" in [text.text for text in root.iter(TEXT)]
    page = render_schedule(schedule, "html").decode()
    assert "<script" not in page
    assert render_schedule(schedule, "png").startswith(b"\x89PNG")


def test_page_is_self_contained() -> None:
    page = render_schedule(pair(), "html").decode()
    assert page.count("<svg") == page.count("</svg>") == page.count("<!DOCTYPE") == 1
    assert "<?xml" not in page
    assert "src=" not in page
    assert "<link" not in page


def test_the_callers_settings_neither_matter_nor_change() -> None:
    plain = render_schedule(pair(), "svg")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "svg.hashsalt": "mine"}):
        before = dict(matplotlib.rcParams)
        assert render_schedule(pair(), "svg") == plain
        assert dict(matplotlib.rcParams) == before


def test_threads_may_draw_at_once() -> None:
    alone = render_schedule(pair(), "svg")
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(lambda _: render_schedule(pair(), "svg"), range(8))) == {alone}


def test_nine_thousand_ops_are_few_things_to_draw() -> None:
    schedule = all_forwards_first(uniform(32, 96))
    with settings():
        axes = schedule_panel(schedule).axes
    per_device = len([*axes.collections, *axes.lines, *axes.texts]) / 32
    assert sum(len(device.compute) for device in schedule.devices) > 9000
    assert per_device < 10


def test_a_very_high_picture_is_coarser() -> None:
    """Thousands of devices beneath one another would be more pixels than can be drawn."""
    with settings():
        picture = encode(Figure(figsize=(1, 800)), "png", "high")
    width, height = struct.unpack(">II", picture[16:24])
    assert (width, height) == (MOST_PIXELS // 800, MOST_PIXELS)
