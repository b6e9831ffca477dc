"""Comparison figure: schedules of one problem at one time scale, one below another, with a table of their values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from optpipe.errors import InputError, Issue
from optpipe.files import write_atomically
from optpipe.kinds import COPIES
from optpipe.plot.figure import encode, format_of, settings
from optpipe.plot.panel import (
    COLUMN_MARGINS,
    COLUMN_POINTS,
    OBJECTIVE_NAMES,
    Box,
    Lane,
    Margins,
    Panel,
    boxes_on,
    draw_boxes,
    draw_column_legend,
    draw_idle,
    draw_legend,
    kinds_in,
    op_entries,
    printable,
    title_text,
)
from optpipe.plot.style import FAINT_INK, INK
from optpipe.schedule import Schedule
from optpipe.units import bytes_text, percent_text, time_text, time_unit

Labelled = tuple[str, Schedule]

MARGINS = Margins(left=1.5, right=2.9, top=1.15, bottom=0.6)
WIDTH_INCHES = 16.0
GAP_INCHES = 0.16
COLUMN_SCALE, COLUMN_LEFT_INCHES = 0.5, 0.95
COLUMNS_INCHES = (0.95, 1.7, 2.7)
"""Right edges of the columns value, bubble and peak, from the panel's right edge."""


def draw_comparison(schedules: Sequence[Labelled], path: Path, width: float | None = None) -> None:
    """Draw schedules with their labels to a .png, .svg, .pdf or .html file.

    `width`: as a figure of a paper, so many inches wide. Raises InputError for another suffix, for no schedules, and
    for schedules of different problems.
    """
    picture_format = format_of(path)
    write_atomically(path, render_comparison(schedules, picture_format, width))


def render_comparison(schedules: Sequence[Labelled], picture_format: str, width: float | None = None) -> bytes:
    """Render to bytes in one of `optpipe.plot.figure.FORMATS`. Raises InputError as `draw_comparison` does."""
    if not schedules:
        raise InputError([Issue("schedules", "empty", "is empty. Maybe no method can handle the problem.")])
    label, first = schedules[0]
    for index, (other_label, other) in enumerate(schedules):
        if other.problem != first.problem:
            detail = (
                f"({other_label}) answers the problem {other.problem.name!r}, but {label} answers "
                f"{first.problem.name!r}. Maybe one was solved before the problem was changed."
            )
            raise InputError([Issue(("schedules", index), "other_problem", detail)])
    with settings():
        panel = comparison_panel(schedules) if width is None else column_panel(schedules, width)
        return encode(panel.figure, picture_format, title_text(schedules[0][1]))


def comparison_panel(schedules: Sequence[Labelled]) -> Panel:
    """Draw the whole figure; call within `optpipe.plot.figure.settings`."""
    blocks = _layout(len(schedules), len(schedules[0][1].devices))
    longest_us = _longest_us(schedules)
    panel = Panel.of(WIDTH_INCHES, blocks[-1][-1].bottom + 0.1, MARGINS, 0.0, longest_us, time_unit(longest_us))
    _draw_ops(panel, schedules, blocks)
    for (label, schedule), lanes in zip(schedules, blocks, strict=True):
        _draw_row(panel, label, schedule, lanes, best=schedule.value_us <= min(s.value_us for _, s in schedules))
    _draw_header(panel, schedules)
    return panel


def column_panel(schedules: Sequence[Labelled], width: float) -> Panel:
    """The picture as a figure of a paper, `width` inches wide: no title; under each label the schedule's value."""
    blocks = _layout(len(schedules), len(schedules[0][1].devices), COLUMN_SCALE)
    longest_us = _longest_us(schedules)
    unit = time_unit(longest_us)
    margins = COLUMN_MARGINS._replace(left=COLUMN_LEFT_INCHES)
    panel = Panel.of(width, blocks[-1][-1].bottom + 0.04, margins, 0.0, longest_us, unit, axis_points=COLUMN_POINTS)
    _draw_ops(panel, schedules, blocks)
    for (label, schedule), lanes in zip(schedules, blocks, strict=True):
        middle = (lanes[0].top + lanes[-1].bottom) / 2
        panel.text_left(middle - 0.05, printable(label, 16), fontsize=COLUMN_POINTS, fontweight="bold")
        panel.text_left(middle + 0.06, time_text(schedule.value_us, unit), fontsize=COLUMN_POINTS - 0.5)
    draw_column_legend(panel, op_entries(_kinds_in(schedules), 1, names_only=True))
    return panel


def _longest_us(schedules: Sequence[Labelled]) -> float:
    return max(end - start for start, end in (schedule.time_span_us for _, schedule in schedules))


def _kinds_in(schedules: Sequence[Labelled]) -> set[str]:
    return set().union(*(kinds_in(schedule) for _, schedule in schedules)) - {*COPIES}


def _layout(schedules: int, devices: int, scale: float = 1.0) -> list[list[Lane]]:
    """For each schedule the lanes of its devices, flatter where there are many."""
    height = scale * min(0.2, max(0.03, 9.0 / (schedules * devices)), max(0.03, 1.2 / devices))
    block = max(devices * height, 0.36 * max(scale, 0.6)) + GAP_INCHES * scale
    return [[Lane(0.06 * scale + k * block + d * height, height) for d in range(devices)] for k in range(schedules)]


def _draw_ops(panel: Panel, schedules: Sequence[Labelled], blocks: Sequence[Sequence[Lane]]) -> None:
    boxes: list[Box] = []
    for (_, schedule), lanes in zip(schedules, blocks, strict=True):
        draw_idle(panel, lanes)
        boxes += _boxes(schedule, lanes)
    draw_boxes(panel, boxes)


def _boxes(schedule: Schedule, lanes: Sequence[Lane]) -> list[Box]:
    """Compute ops, moved so that the schedule starts at 0."""
    start_us, _ = schedule.time_span_us
    return [
        box._replace(start_us=box.start_us - start_us, end_us=box.end_us - start_us)
        for d, (device, lane) in enumerate(zip(schedule.devices, lanes, strict=True))
        for box in boxes_on(schedule.problem, d, device.compute, lane)
    ]


def _draw_row(panel: Panel, label: str, schedule: Schedule, lanes: Sequence[Lane], best: bool) -> None:
    middle = (lanes[0].top + lanes[-1].bottom) / 2
    panel.text_left(middle - 0.08, printable(label, 16), fontsize=10, fontweight="bold")
    panel.text_left(middle + 0.1, schedule.status, fontsize=8.5, color=FAINT_INK)
    for inches, text in zip(COLUMNS_INCHES, _cells(schedule), strict=True):
        panel.text_right(middle, text, inches, ha="right", fontsize=9.5, fontweight="bold" if best else "normal")


def _cells(schedule: Schedule) -> tuple[str, str, str]:
    peak_bytes = max(plan.peak_bytes for plan in schedule.devices)
    return time_text(schedule.value_us), percent_text(schedule.bubble), bytes_text(peak_bytes)


def _draw_header(panel: Panel, schedules: Sequence[Labelled]) -> None:
    first = schedules[0][1]
    panel.text_above(0.85, title_text(first), fontsize=15, fontweight="bold")
    bound = time_text(max(schedule.bound_us for _, schedule in schedules))
    panel.text_above(0.55, f"{OBJECTIVE_NAMES[first.objective]}   ·   best proved bound {bound}", fontsize=10.5)
    draw_legend(panel, op_entries(_kinds_in(schedules), max(map(len, first.problem.stages_of))))
    for inches, text in zip(COLUMNS_INCHES, ("value", "bubble", "peak"), strict=True):
        panel.text_right(-0.14, text, inches, ha="right", fontsize=9.5, color=INK)
