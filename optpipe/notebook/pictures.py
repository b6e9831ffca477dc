"""Pictures within a notebook's output: the SVG of `optpipe.plot`, made to stand among others, and not too large."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import singledispatch

from optpipe.notebook.comparison import SideBySide
from optpipe.plot import render_comparison, render_schedule
from optpipe.plot.planned_and_measured import render_planned_and_measured
from optpipe.schedule import Schedule
from optpipe.trace import Trace
from optpipe.trace.compare import compare

MOST_OPS = 4000
"""A larger picture would take seconds for each look, and a notebook keeps every one."""

MOST_BYTES = 1_800_000

_LOOK = "max-width:100%;height:auto;stroke-linejoin:round;stroke-linecap:butt"
"""The second half is what matplotlib says in a style sheet, which would hold for the whole page."""


@singledispatch
def picture_of(_shown: object) -> str:
    """The picture of an object as a fragment of HTML; a sentence instead where it is too large, nothing without one."""
    return ""


@picture_of.register
def _of_schedule(schedule: Schedule) -> str:
    instead = "optpipe.plot.draw_schedule(schedule, Path('schedule.svg'))"
    return _unless_too_large([schedule], lambda: render_schedule(schedule, "svg"), instead)


@picture_of.register
def _of_trace(trace: Trace) -> str:
    def draw() -> bytes:
        return render_planned_and_measured(trace, compare(trace), "svg")

    return _unless_too_large([trace.schedule] * 2, draw, "optpipe trace TRACE.json --plot trace.svg")


@picture_of.register
def _of_several(several: SideBySide) -> str:
    instead = "optpipe.plot.draw_comparison([(name, schedule), ...], Path('schedules.svg'))"
    if not several.answer_one_problem:
        return ""
    schedules = list(several.schedules.values())
    return _unless_too_large(schedules, lambda: render_comparison(several.best_first, "svg"), instead)


def _unless_too_large(schedules: Sequence[Schedule], draw: Callable[[], bytes], instead: str) -> str:
    ops = sum(len(stream) for schedule in schedules for device in schedule.devices for _, stream in device.streams())
    picture = _fragment(draw().decode()) if ops <= MOST_OPS else ""
    if picture and len(picture.encode()) <= MOST_BYTES:
        return picture
    return f"<p>A picture of {ops:,} ops is too large for a notebook; <code>{instead}</code> draws it to a file.</p>"


def _fragment(svg: str) -> str:
    """An SVG file as a part of a page: without its prolog, and without what would reach other parts of the page.

    Of the ids those stay that are referred to. They are made from what they name, so equal ids are equal things.
    """
    svg = re.sub(r"\s*<metadata>.*?</metadata>|\s*<style[^>]*>[^<]*</style>", "", svg[svg.index("<svg") :], flags=re.S)
    return re.sub(r'<g id="[^"]*"', "<g", svg).replace("<svg ", f'<svg style="{_LOOK}" ', 1)
