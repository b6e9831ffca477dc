"""Objects show what they are, in HTML, in one line and in rich, whatever their names hold."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from rich.console import Console

from instances import uniform
from optpipe.display import Displayed, Summary
from optpipe.layers import LayerProfile
from optpipe.notebook import (
    MOST_BYTES,
    MOST_OPS,
    MOST_ROWS,
    SideBySide,
    render_figure,
    render_html,
    render_line,
    render_rich,
)
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.train import CheckResult, DeviceMemory, TrainingResult
from solver.limits import Limits
from solver.solve import solve
from tests.browser import WAIT_MS, open_page, running_browser
from tests.layer_profiles import BLOCK
from tests.optpipe.trace.traces import trace_of
from tests.recomputing import every_mode

HOSTILE = '<img src=x onerror="window.hit=1"> & [bold]loud\x1b[31m\u202etfel\n</svg><script>window.hit=1</script>'


class Cells(HTMLParser):
    """The tables of a page, and what else is in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self._in_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._in_cell = tag in ("td", "th")
        if tag == "tr":
            self.rows.append([])
        if self._in_cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data


def solved(problem: Problem, method: str = "1f1b") -> Schedule:
    return solve(problem, method, Limits(time_limit_s=10.0))


def hostile(problem: Problem) -> Problem:
    data = problem.to_data()
    devices = [{**device, "name": HOSTILE} for device in data["devices"]]
    return Problem.from_data({**data, "name": HOSTILE, "devices": devices})


def printed(shown: object, width: int = 160) -> str:
    target = io.StringIO()
    Console(file=target, width=width).print(shown)
    return target.getvalue()


def test_a_schedule_shows_a_row_for_each_device_and_its_chart() -> None:
    schedule = solved(uniform(3, 4, budget=100))
    found = Cells(schedule._repr_html_())
    head, *rows = found.rows
    idle = ["idle before", "within", "after"]
    assert head == ["device", "stages", "busy", *idle, "offloaded", "peak", "peak, any timing", "budget"]
    assert [row[0] for row in rows] == ["device 0", "device 1", "device 2"]
    assert [row[7] for row in rows] == [f"{device.peak_bytes} B" for device in schedule.devices]
    assert {row[-1] for row in rows} == {"100 B"}
    assert "svg" in found.tags


def test_a_schedule_shows_how_much_is_recomputed_where_it_may_be() -> None:
    head, *rows = Cells(every_mode()._repr_html_()).rows
    assert head[6:8] == ["offloaded", "recomputed"]
    assert [row[6:8] for row in rows] == [["1", "3"], ["0", "2"]]


def test_a_problem_shows_its_devices() -> None:
    head, *rows = Cells(uniform(2, 5, budget=None, v_shape=True)._repr_html_()).rows
    assert head == ["device", "stages", "work", "memory"]
    assert rows == [["device 0", "0, 3", "300.0 µs", "no limit"], ["device 1", "1, 2", "300.0 µs", "no limit"]]


def test_layers_show_themselves() -> None:
    profile = LayerProfile.from_data(
        {"format": "optpipe.layers/1", "name": "a model", "layers": [BLOCK | {"repeat": 3}]}
    )
    assert "3 layers" in profile._repr_html_()
    assert Cells(profile._repr_html_()).rows[1][:2] == ["block", "3"]


def test_a_trace_shows_plan_and_step() -> None:
    found = Cells(trace_of(solved(uniform(2, 3)))._repr_html_())
    head = ["device", "idle before + within + after, planned", "measured", "peak", "peak, planned"]
    assert found.rows[0] == head
    assert found.rows[1][1].count(" + ") == 2
    assert len(found.rows) == 3
    assert "svg" in found.tags


def test_schedules_side_by_side_have_the_best_first() -> None:
    problem = uniform(3, 6)
    shown = SideBySide({"plain": solved(problem, "gpipe"), "split": solved(problem, "zb-h2")})
    page = shown._repr_html_()
    assert [row[0] for row in Cells(page).rows] == ["", "split", "plain"]
    picture = page[page.index("<svg") :]
    assert picture.index("split") < picture.index("plain")
    assert render_html(SideBySide({})).count("No schedules") == 1


def test_schedules_of_several_problems_have_a_table_alone() -> None:
    shown = SideBySide({"long": solved(uniform(3, 6)), "short": solved(uniform(3, 4))})
    found = Cells(shown._repr_html_())
    assert [row[0] for row in found.rows] == ["", "short", "long"]
    assert "svg" not in found.tags


def test_names_are_escaped_and_kept_to_one_line() -> None:
    problem = hostile(uniform(2, 3))
    for shown in (problem, solved(problem), SideBySide({HOSTILE: solved(problem)})):
        assert not Cells(render_html(shown)).tags & {"img", "script"}
        for text in (render_line(shown), render_html(shown)):
            assert not set("\x1b\u202e") & set(text)
        assert "\n" not in render_line(shown)
        assert "[bold]" in printed(render_rich(shown))
        assert not set("\x1b\u202e") & set(printed(render_rich(shown)))


def test_a_browser_shows_the_chart_and_runs_nothing() -> None:
    with running_browser() as browser, open_page(browser, "http://127.0.0.1:1") as page:
        before = "<style>p { stroke-linecap: round }</style><p id='mine'>mine</p>"
        page.set_content(before + render_html(solved(hostile(uniform(2, 3)))), timeout=WAIT_MS)
        assert page.locator("svg").bounding_box()["width"] > 300  # type: ignore[index]
        assert page.locator("svg text", has_text="F forward").is_visible()
        assert page.evaluate("window.hit") is None
        assert page.evaluate("getComputedStyle(document.getElementById('mine')).strokeLinecap") == "round"


def test_a_long_table_says_how_much_more_there_is() -> None:
    devices = MOST_ROWS + 5
    rows = Cells(render_html(uniform(devices, 1))).rows
    assert len(rows) == 1 + MOST_ROWS + 1
    assert rows[-1][0] == "... and 5 more"


@pytest.mark.parametrize("width", [60, 160])
def test_rich_prints_the_table(width: int) -> None:
    text = printed(solved(uniform(2, 3)), width)
    assert "device 1" in text
    assert "1f1b" in text


def test_an_object_of_another_room_says_itself_what_it_is() -> None:
    class Run(Displayed):
        def summary(self) -> Summary:
            return Summary("a run", [("loss", "1.5")])

    assert render_line(Run()) == "a run, loss 1.5"
    assert Cells(Run()._repr_html_()).tags == {"div", "p", "strong", "br"}


def test_a_training_run_shows_its_losses_and_its_check() -> None:
    plain = TrainingResult((5.25, 2.5), (0.1, 0.3), 1000, 1, check=None)
    assert "loss 5.2500 -> 2.5000, median step" in render_line(plain)
    check = CheckResult(1e-7, "stage 0 weight", 0.0, (DeviceMemory(3000, 2000, (0, 5), 40),))
    rows = Cells(render_html(replace(plain, check=check))).rows
    assert rows[1:] == [["device 0", "2.93 KiB", "1.95 KiB", "40 B", "5 B"]]
    assert render_line(replace(plain, losses=(), step_seconds=())).endswith(
        "0 steps of 1,000 parameters in 1 process(es)"
    )


class Printer:
    """Stand-in for IPython's printer."""

    def __init__(self) -> None:
        self.said = ""

    def text(self, text: str) -> None:
        self.said += text


def test_in_ipython_a_schedule_is_one_line() -> None:
    printer = Printer()
    solved(uniform(3, 4))._repr_pretty_(printer, False)
    assert printer.said.startswith("3 devices, 4 microbatches, 1f1b, ")
    assert "\n" not in printer.said


CAP_BYTES = 2_000_000


def scheduled(devices: int, microbatches: int, method: str = "zb-h1") -> Schedule:
    return solve(uniform(devices, microbatches), method, Limits(time_limit_s=10.0))


def ops_of(schedule: Schedule) -> int:
    return sum(len(stream) for device in schedule.devices for _, stream in device.streams())


def test_the_largest_picture_is_within_the_cap() -> None:
    schedule = scheduled(24, 55)
    assert 0.98 * MOST_OPS <= ops_of(schedule) <= MOST_OPS
    page = render_html(schedule)
    assert "<svg" in page
    assert len(page.encode()) <= CAP_BYTES


def test_a_larger_schedule_says_how_to_draw_it() -> None:
    schedule = scheduled(24, 60)
    page = render_html(schedule)
    assert "<svg" not in page
    assert f"A picture of {ops_of(schedule):,} ops is too large for a notebook" in page
    assert "draw_schedule" in page
    assert "device 23" in page
    assert len(page.encode()) < 50_000


def test_several_count_together() -> None:
    half = scheduled(24, 30)
    assert "<svg" in render_figure(SideBySide({"one": half}))
    assert "<svg" not in render_figure(SideBySide({"one": half, "other": half}))


def test_a_picture_beyond_the_bytes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = scheduled(2, 3)
    monkeypatch.setattr("optpipe.notebook.MOST_BYTES", 1000)
    assert "too large" in render_figure(schedule)
    assert MOST_BYTES < CAP_BYTES


def test_a_picture_reaches_nothing_but_itself() -> None:
    picture = render_figure(scheduled(2, 3))
    ElementTree.fromstring(picture)
    assert "<style" not in picture
    assert "<metadata" not in picture
    referred = set(re.findall(r"""(?:url\(|href=")#([^")]+)""", picture))
    assert set(re.findall(r' id="([^"]+)"', picture)) == referred


def test_objects_without_a_picture_have_none() -> None:
    assert render_figure(uniform(2, 3)) == ""
