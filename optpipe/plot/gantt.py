"""One schedule: a Gantt chart with the memory curve of each device beneath its lanes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from optpipe.files import write_atomically
from optpipe.kinds import StreamName
from optpipe.plot.figure import encode, format_of, settings
from optpipe.plot.panel import (
    COLUMN_MARGINS,
    COLUMN_POINTS,
    Box,
    Lane,
    Margins,
    MemoryScale,
    Panel,
    boxes_on,
    draw_boxes,
    draw_column_legend,
    draw_idle,
    draw_legend,
    draw_memory,
    draw_numbers,
    figures_text,
    kinds_in,
    memory_entries,
    op_entries,
    peak_text,
    printable,
    title_text,
    width_inches,
)
from optpipe.plot.style import BUDGET, FAINT_INK
from optpipe.schedule import DevicePlan, Schedule
from optpipe.units import idle_text, time_unit

MARGINS = Margins(left=1.3, right=2.05, top=1.1, bottom=0.6)
LONGEST_DEVICE_NAME = 12
COMPUTE_INCHES, TRANSFER_INCHES, MEMORY_INCHES, GAP_INCHES = 0.36, 0.14, 0.34, 0.22
"""Heights at 8 devices; more devices are drawn flatter, fewer taller."""
NAMED_LANE_INCHES = 0.11
"""The least height of a transfer lane that has room for its name."""


def draw_schedule(schedule: Schedule, path: Path, width: float | None = None) -> None:
    """Draw `schedule` to a .png, .svg, .pdf or .html file; `width`: as a figure of a paper, so many inches wide.

    Raises InputError for another suffix, OSError where the file cannot be written.
    """
    picture_format = format_of(path)
    write_atomically(path, render_schedule(schedule, picture_format, width))


def render_schedule(schedule: Schedule, picture_format: str, width: float | None = None) -> bytes:
    """The picture of `schedule` as bytes in one of `optpipe.plot.figure.FORMATS`; `width` as in `draw_schedule`."""
    with settings():
        panel = schedule_panel(schedule) if width is None else column_panel(schedule, width)
        return encode(panel.figure, picture_format, title_text(schedule))


@dataclass(frozen=True)
class _Rows:
    """The lanes of one device; those for transfers only where it has any."""

    streams: dict[StreamName, Lane]
    memory: Lane


def schedule_panel(schedule: Schedule) -> Panel:
    """The whole picture on its figure; call within `optpipe.plot.figure.settings`."""
    rows = list(_layout(schedule.devices))
    start_us, end_us = schedule.time_span_us
    height = rows[-1].memory.bottom + 0.1
    width = width_inches(max(len(device.compute) for device in schedule.devices))
    panel = Panel.of(width, height, MARGINS, start_us, end_us, time_unit(end_us - start_us))
    _draw_ops(panel, schedule, rows)
    scale = MemoryScale.of(schedule)
    for d, row in enumerate(rows):
        draw_memory(panel, row.memory, schedule, d, scale)
        _draw_labels(panel, schedule, d, row)
        _draw_peak(panel, schedule, d, row, scale)
    _draw_header(panel, schedule, scale)
    return panel


COLUMN_SCALE = 0.42
"""Heights in a column of print, in those of a whole page."""


def column_panel(schedule: Schedule, width: float) -> Panel:
    """The picture as a figure of a paper, `width` inches wide: no title, no figures; its caption has those."""
    rows = list(_layout(schedule.devices, COLUMN_SCALE))
    start_us, end_us = schedule.time_span_us
    height = rows[-1].memory.bottom + 0.04
    unit = time_unit(end_us - start_us)
    panel = Panel.of(width, height, COLUMN_MARGINS, start_us, end_us, unit, axis_points=COLUMN_POINTS)
    _draw_ops(panel, schedule, rows)
    scale = MemoryScale.of(schedule)
    for d, row in enumerate(rows):
        draw_memory(panel, row.memory, schedule, d, scale)
        panel.text_left(row.streams["compute"].middle, str(d), fontsize=COLUMN_POINTS)
    budgets = any(scale.shows(device.memory_bytes) for device in schedule.problem.devices)
    draw_column_legend(panel, op_entries(kinds_in(schedule), 1, names_only=True) + memory_entries(budgets))
    return panel


def _layout(devices: Sequence[DevicePlan], scale: float = 1.0) -> Iterator[_Rows]:
    stretch = scale * min(1.6, max(0.5, math.sqrt(8 / len(devices))))
    top = 0.06 * scale
    for device in devices:
        streams: dict[StreamName, Lane] = {}
        for name, ops in device.streams():
            if name == "compute" or ops:
                height = stretch * (COMPUTE_INCHES if name == "compute" else TRANSFER_INCHES)
                streams[name] = Lane(top, height)
                top += height + 0.025 * scale
        memory = Lane(top + 0.03 * scale, stretch * MEMORY_INCHES)
        yield _Rows(streams, memory)
        top = memory.bottom + stretch * GAP_INCHES


def _draw_ops(panel: Panel, schedule: Schedule, rows: Sequence[_Rows]) -> None:
    draw_idle(panel, [lane for row in rows for lane in row.streams.values()])
    boxes: list[Box] = []
    for d, (device, row) in enumerate(zip(schedule.devices, rows, strict=True)):
        for name, ops in device.streams():
            if name in row.streams:
                boxes += boxes_on(schedule.problem, d, ops, row.streams[name])
    draw_boxes(panel, boxes)
    draw_numbers(panel, boxes)


def _draw_labels(panel: Panel, schedule: Schedule, d: int, row: _Rows) -> None:
    device = schedule.problem.devices[d]
    compute = row.streams["compute"]
    size = _label_points(row)
    panel.text_left(
        compute.middle, printable(device.name, LONGEST_DEVICE_NAME) or f"device {d}", fontsize=size, fontweight="bold"
    )
    panel.text_left(row.memory.middle, _stages_text(schedule.problem.stages_of[d]), fontsize=size - 1, color=FAINT_INK)
    idle = f"idle {idle_text(schedule.idle_us(d), panel.unit)}"
    panel.text_right(compute.middle, idle, fontsize=size - 1, color=FAINT_INK)
    for name in ("offload", "reload"):
        lane = row.streams.get(name)
        if lane and lane.height >= NAMED_LANE_INCHES:
            panel.text_left(lane.middle, name, fontsize=7, color=FAINT_INK)


def _draw_peak(panel: Panel, schedule: Schedule, d: int, row: _Rows, scale: MemoryScale) -> None:
    peak, budget = schedule.devices[d].peak_bytes, schedule.problem.devices[d].memory_bytes
    over = budget is not None and peak > budget
    panel.text_right(
        row.memory.middle,
        peak_text(peak, budget, scale),
        fontsize=_label_points(row) - 1,
        color=BUDGET if over else FAINT_INK,
        fontweight="bold" if over else "normal",
    )


def _label_points(row: _Rows) -> float:
    return 9.5 if row.streams["compute"].height > 0.25 else 8.0


def _stages_text(stages: Sequence[int]) -> str:
    if not stages:
        return "no stage"
    if len(stages) > 3:
        return f"{len(stages)} stages"
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _draw_header(panel: Panel, schedule: Schedule, scale: MemoryScale) -> None:
    panel.text_above(0.8, title_text(schedule), fontsize=15, fontweight="bold")
    panel.text_above(0.5, figures_text(schedule), fontsize=10.5)
    budgets = any(scale.shows(device.memory_bytes) for device in schedule.problem.devices)
    most_stages = max(map(len, schedule.problem.stages_of))
    entries = op_entries(kinds_in(schedule), most_stages, idle_figures=True)
    draw_legend(panel, entries + memory_entries(budgets))
