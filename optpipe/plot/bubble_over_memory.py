"""What memory buys: the bubble against the memory of a device, one line for each number of microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from optpipe.errors import InputError, Issue
from optpipe.plot.axes_grid import AxesGrid, style
from optpipe.plot.colours import FAINT_INK, INK
from optpipe.plot.curve_colours import CurveLook, curve_looks, legend_lines
from optpipe.plot.output import encode, format_of, settings

WIDTH_INCHES, HEIGHT_INCHES = 7.5, 3.6
HEADROOM = 1.08
LINE_POINTS = 1.8


@dataclass(frozen=True)
class MemoryLine:
    """The least bubble (0 to 1) with so much memory or more, at rising memory."""

    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Mark:
    """A schedule of others: its memory, its bubble, and its name."""

    memory: float
    bubble: float
    name: str


@dataclass(frozen=True)
class MemoryChart:
    """Lines over memory, named with its unit as in "memory in microbatches", and marks to hold them against."""

    title: str
    subtitle: str
    memory_name: str
    lines: Sequence[MemoryLine]
    marks: Sequence[Mark] = ()


def draw_bubble_over_memory(chart: MemoryChart, path: Path, title: str) -> None:
    """Draw a chart to a .png, .svg or .html file. Raises InputError for another suffix, and where it has no lines."""
    picture_format = format_of(path)
    if not chart.lines:
        raise InputError([Issue("lines", "empty", "is empty. Maybe no pattern fits the budgets.")])
    with settings():
        path.write_bytes(encode(bubble_over_memory_grid(chart, title).figure, picture_format, title))


def bubble_over_memory_grid(chart: MemoryChart, title: str) -> AxesGrid:
    """The whole picture on its figure; call within `optpipe.plot.output.settings`."""
    grid = AxesGrid.of(1, HEIGHT_INCHES, WIDTH_INCHES)
    looks = curve_looks(line.label for line in chart.lines)
    _draw_chart(grid.axes[0], chart, looks)
    entries: list[Artist] = [*legend_lines(looks)]
    if chart.marks:
        entries.append(Line2D([], [], **_mark_look(), label="public"))
    grid.draw_header(title, entries)
    return grid


def _draw_chart(axes: Axes, chart: MemoryChart, looks: Mapping[str, CurveLook]) -> None:
    style(axes, chart.title, chart.subtitle)
    axes.set_xlabel(chart.memory_name, color=FAINT_INK, fontsize=9)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda bubble, _: f"{100 * bubble:g} %"))
    for line in chart.lines:
        look = looks[line.label]
        memory, shares = zip(*line.points, strict=True)
        axes.step(memory, shares, where="post", color=look.colour, linestyle=look.dashes, linewidth=LINE_POINTS)
    for mark in chart.marks:
        axes.plot([mark.memory], [mark.bubble], **_mark_look(), zorder=4)
        label = axes.annotate(mark.name, (mark.memory, mark.bubble), (6, 5), textcoords="offset points", fontsize=8)
        label.set(color=INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.75}, zorder=5)
    bubbles = [bubble for line in chart.lines for _, bubble in line.points]
    axes.set_ylim(0, HEADROOM * max([*bubbles, *(mark.bubble for mark in chart.marks)]))


def _mark_look() -> dict[str, Any]:
    return {"color": INK, "marker": "x", "markersize": 6, "markeredgewidth": 1.4, "linestyle": ""}
