"""Pictures of benchmarks: the bubble over the memory of a device, and seconds over the size of a problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from optpipe.errors import InputError, Issue
from optpipe.files import write_atomically
from optpipe.plot.figure import AxesGrid, encode, format_of, line_widths, logarithmic_seconds, settings, style
from optpipe.plot.legend import legend_lines
from optpipe.plot.style import FAINT_INK, INK, CurveLook, curve_looks

MEMORY_WIDTH_INCHES, MEMORY_HEIGHT_INCHES = 7.5, 3.6
HEADROOM = 1.08
LINE_POINTS = 1.8
SIZES_HEIGHT_INCHES = 2.4
LEAST_S = 0.001


@dataclass(frozen=True)
class MemoryLine:
    """Line of the least bubble (0 to 1) over memory; points are sorted by memory."""

    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Mark:
    """Mark of a public schedule: its memory, its bubble, and its name."""

    memory: float
    bubble: float
    name: str


@dataclass(frozen=True)
class MemoryChart:
    """Chart over memory, whose name has the unit as in "memory in microbatches", with marks for comparison."""

    title: str
    subtitle: str
    memory_name: str
    lines: Sequence[MemoryLine]
    marks: Sequence[Mark] = ()


def draw_bubble_over_memory(chart: MemoryChart, path: Path, title: str) -> None:
    """Draw a chart to a .png, .svg, .pdf or .html file. Raises InputError for another suffix, or without lines."""
    picture_format = format_of(path)
    if not chart.lines:
        raise InputError([Issue("lines", "empty", "is empty. Maybe no pattern fits the budgets.")])
    with settings():
        write_atomically(path, encode(bubble_over_memory_grid(chart, title).figure, picture_format, title))


def bubble_over_memory_grid(chart: MemoryChart, title: str) -> AxesGrid:
    """Build the figure; call within `optpipe.plot.figure.settings`."""
    grid = AxesGrid.of(1, MEMORY_HEIGHT_INCHES, MEMORY_WIDTH_INCHES)
    looks = curve_looks(line.label for line in chart.lines)
    _draw_memory_chart(grid.axes[0], chart, looks)
    entries: list[Artist] = [*legend_lines(looks)]
    if chart.marks:
        entries.append(Line2D([], [], **_mark_look(), label="public"))
    grid.draw_header(title, entries)
    return grid


def _draw_memory_chart(axes: Axes, chart: MemoryChart, looks: Mapping[str, CurveLook]) -> None:
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


@dataclass(frozen=True)
class SizeLine:
    """Line of seconds over size; sizes at which the milestone was not reached are left out."""

    label: str
    points: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class SizeChart:
    """Chart over one size, such as "microbatches"; `subtitle` names the fixed parameters."""

    title: str
    subtitle: str
    size_name: str
    lines: Sequence[SizeLine]


def draw_seconds_by_size(charts: Sequence[SizeChart], path: Path, title: str) -> None:
    """Draw the charts to a .png, .svg, .pdf or .html file. Raises InputError for another suffix, or without lines."""
    picture_format = format_of(path)
    if not any(chart.lines for chart in charts):
        raise InputError([Issue("charts", "empty", "is without lines. Maybe no schedule was found.")])
    with settings():
        write_atomically(path, encode(seconds_by_size_grid(charts, title).figure, picture_format, title))


def seconds_by_size_grid(charts: Sequence[SizeChart], title: str) -> AxesGrid:
    """Build the figure; call within `optpipe.plot.figure.settings`."""
    grid = AxesGrid.of(len(charts), SIZES_HEIGHT_INCHES)
    range_s = _whole_decades([s for chart in charts for line in chart.lines for _, s in line.points])
    looks = curve_looks(line.label for chart in charts for line in chart.lines)
    for axes, chart in zip(grid.axes, charts, strict=True):
        _draw_size_chart(axes, chart, looks, range_s)
    grid.draw_header(title, legend_lines(looks, marker="o", markersize=4))
    return grid


def _whole_decades(seconds: Sequence[float]) -> tuple[float, float]:
    """Range of whole decades around all seconds, for one scale on all charts."""
    low = math.floor(math.log10(max(min(seconds), LEAST_S)))
    high = math.ceil(math.log10(max(*seconds, LEAST_S)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def _draw_size_chart(
    axes: Axes, chart: SizeChart, looks: Mapping[str, CurveLook], range_s: tuple[float, float]
) -> None:
    style(axes, chart.title, chart.subtitle)
    axes.set_xscale("log", base=2)
    sizes = sorted({size for line in chart.lines for size, _ in line.points})
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    axes.set_xlabel(chart.size_name, color=FAINT_INK, fontsize=9)
    logarithmic_seconds(axes, "y", *range_s)
    for line, width in zip(chart.lines, line_widths(len(chart.lines)), strict=True):
        look = looks[line.label]
        line_sizes = [size for size, _ in line.points]
        seconds = [max(s, LEAST_S) for _, s in line.points]
        [drawn] = axes.plot(
            line_sizes, seconds, color=look.colour, linestyle=look.dashes, linewidth=width, clip_on=False
        )
        drawn.set(marker="o", markersize=2.5 * width, zorder=3)
