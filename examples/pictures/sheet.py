"""Timed schedules below each other at one time scale, narrow enough for a page of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.legend import Legend
from matplotlib.patches import Patch

from examples.pictures.memory import draw_memory, highest_bytes
from optpipe.kinds import COPIES, KIND, STREAMS, codes
from optpipe.plot.legend import draw_legend_row
from optpipe.plot.panel import (
    GUTTER_INCHES,
    Box,
    Entry,
    Lane,
    Margins,
    Panel,
    draw_boxes,
    draw_numbers,
    memory_entries,
    op_entries,
)
from optpipe.plot.style import FAINT_INK, IDLE, INK, op_colour
from optpipe.simulate import Simulation
from optpipe.units import percent_text, time_unit

WIDTH_INCHES = 8.2
MARGINS = Margins(left=0.85, right=1.5, top=0.62, bottom=0.5)
TITLE_INCHES, GAP_INCHES = 0.3, 0.2
COMPUTE_INCHES, COPY_INCHES, MEMORY_INCHES, BETWEEN_INCHES = 0.27, 0.17, 0.36, 0.03
COMPUTE = 0
"""Index of the compute stream in STREAMS."""


@dataclass(frozen=True)
class Strip:
    """Schedule with a title. `devices`: devices to draw (empty: all); `memory`: devices whose memory is drawn too.

    `microbatch_shades`: the shade of a box says of which microbatch it is, instead of which stage of its device.
    """

    title: str
    timed: Simulation
    devices: Sequence[int] = ()
    memory: Sequence[int] = ()
    microbatch_shades: bool = False

    @property
    def shown(self) -> Sequence[int]:
        """Devices to draw."""
        return self.devices or range(len(self.timed.problem.devices))


@dataclass(frozen=True)
class Rows:
    """Positions of a strip: its title, lanes by (device, index of the stream in STREAMS), memory by device."""

    title: float
    lanes: dict[tuple[int, int], Lane]
    memory: dict[int, Lane]
    bottom: float


def sheet(strips: Sequence[Strip]) -> tuple[Panel, Sequence[Rows]]:
    """Draw the picture, and return it with its rows; call within `optpipe.plot.figure.settings`."""
    layout = _layout(strips)
    longest_us = max(float(strip.timed.end_us.max()) for strip in strips)
    panel = Panel.of(WIDTH_INCHES, layout[-1].bottom, MARGINS, 0.0, longest_us, time_unit(longest_us))
    top_bytes = max(highest_bytes(strip.timed, strip.memory) for strip in strips)
    boxes = [_boxes(strip, rows) for strip, rows in zip(strips, layout, strict=True)]
    for strip, rows in zip(strips, layout, strict=True):
        _draw_idle(panel, strip.timed, rows)
        _draw_words(panel, strip, rows)
        for device, lane in rows.memory.items():
            draw_memory(panel, lane, strip.timed, device, top_bytes)
    draw_boxes(panel, list(chain(*boxes)))
    # Slices are narrower than whole microbatches, whose numbers are drawn all the same.
    sliced = any(strip.timed.problem.slice_count > 1 for strip in strips)
    for alike in boxes if sliced else [list(chain(*boxes))]:
        draw_numbers(panel, alike)
    _draw_legend(panel, strips)
    return panel, layout


def figures_text(timed: Simulation) -> str:
    """Value in milliseconds, and bubble of the busiest device."""
    busiest = max(timed.problem.work_us)
    return f"{timed.value_us / 1000:g} ms, bubble {percent_text(1 - busiest / timed.value_us)}"


def _layout(strips: Sequence[Strip]) -> list[Rows]:
    top, layout = 0.0, []
    for strip in strips:
        title, top = top + 0.14, top + TITLE_INCHES
        lanes: dict[tuple[int, int], Lane] = {}
        memory: dict[int, Lane] = {}
        for device in strip.shown:
            for stream in _streams(strip.timed, device):
                lanes[device, stream] = Lane(top, COMPUTE_INCHES if stream == COMPUTE else COPY_INCHES)
                top = lanes[device, stream].bottom + BETWEEN_INCHES
            if device in strip.memory:
                memory[device] = Lane(top + 0.02, MEMORY_INCHES)
                top = memory[device].bottom + 0.1
        layout.append(Rows(title, lanes, memory, top + 0.04))
        top += GAP_INCHES
    return layout


def _streams(timed: Simulation, device: int) -> list[int]:
    """Streams that a device uses; always the compute stream."""
    return sorted({COMPUTE, *timed.ops[timed.device_slice(device)].stream.tolist()})


def _boxes(strip: Strip, rows: Rows) -> list[Box]:
    boxes, timed, joined = [], strip.timed, _joined(strip.timed)
    for k, (op, device, start_us, end_us) in enumerate(
        zip(timed.ops, timed.device, timed.start_us, timed.end_us, strict=True)
    ):
        lane = rows.lanes.get((int(device), STREAMS.index(op.stream)))
        if lane:
            if k in joined:
                lane = Lane(lane.top if op.kind == "F" else lane.middle, lane.height / 2)
            problem = timed.problem
            stages = problem.stages_of[device]
            shade = (stages.index(op.stage) if op.kind in KIND else 0), len(stages)
            if strip.microbatch_shades:
                shade = op.microbatch // problem.slice_count, problem.microbatches
            colour = op_colour(op.kind, *shade)
            label = problem.unit_name(op.microbatch)
            boxes.append(Box(float(start_us), float(end_us), op, lane, colour, label))
    return boxes


def _joined(timed: Simulation) -> set[int]:
    """Indices of the ops of blocks: on one device, ops that take time run at once in them alone."""
    lasts = timed.end_us > timed.start_us
    at_once = (timed.start_us[1:] == timed.start_us[:-1]) & lasts[1:] & lasts[:-1]
    at_once &= (timed.device[1:] == timed.device[:-1]) & ~np.isin(timed.ops.kind[1:], codes(COPIES))
    firsts = np.flatnonzero(at_once)
    return {*firsts.tolist(), *(firsts + 1).tolist()}


def _draw_idle(panel: Panel, timed: Simulation, rows: Rows) -> None:
    """Draw the background of each lane up to the end of this schedule."""
    end = float(timed.end_us.max()) / panel.unit.size
    corners = [[(0, lane.top), (end, lane.top), (end, lane.bottom), (0, lane.bottom)] for lane in rows.lanes.values()]
    panel.axes.add_collection(PolyCollection(corners, facecolors=IDLE, linewidths=0, zorder=1), autolim=False)


def _draw_words(panel: Panel, strip: Strip, rows: Rows) -> None:
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # the grid ends where words begin
    panel.text_right(rows.title, strip.title, -panel.width, fontsize=10, fontweight="bold", bbox=ground)
    for (device, stream), lane in rows.lanes.items():
        if stream == COMPUTE:
            panel.text_left(lane.middle, f"device {device}", fontsize=9, color=INK)
        else:
            panel.text_left(lane.middle, ("", "offload", "reload")[stream], fontsize=7.5, color=FAINT_INK)


def _draw_legend(panel: Panel, strips: Sequence[Strip]) -> None:
    """Draw the legend: kinds of op in the upper row; shades, idle time and memory in the lower one."""
    kinds = {kind for strip in strips for kind in strip.timed.ops.kinds}
    stages = max(len(stages) for strip in strips for stages in strip.timed.problem.stages_of)
    entries = op_entries(kinds, stages)
    if any(strip.microbatch_shades for strip in strips):
        count = max(strip.timed.problem.microbatches for strip in strips)
        shades = tuple(Patch(facecolor=op_colour("F", rank, count)) for rank in range(count))
        entries.insert(len(kinds), (shades, "first to last microbatch"))
    ops, rest = entries[: len(kinds)], entries[len(kinds) :]
    if any(strip.memory for strip in strips):
        rest += memory_entries(any(strip.timed.problem.devices[0].memory_bytes for strip in strips))
    width, height = panel.figure.get_size_inches()

    def draw(row: Sequence[Entry], inches_below_top: float) -> Legend:
        anchor = GUTTER_INCHES / width, 1 - inches_below_top / height
        return draw_legend_row(
            panel.figure, row, anchor, "center left", handlelength=1.6, handletextpad=0.5, columnspacing=1.2
        )

    upper = draw(ops, 0.16)
    while upper.get_window_extent().width > (width - 2 * GUTTER_INCHES) * panel.figure.dpi:
        upper.remove()
        rest.insert(0, ops.pop())
        upper = draw(ops, 0.16)
    draw(rest, 0.42)
