"""Small charts side by side in rows on one figure, with room above for a title and one legend for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from optpipe.plot.colours import FAINT_INK, GRID, INK
from optpipe.plot.legend_row import draw_legend_row
from optpipe.plot.panel import printable

COLUMNS = 3
WIDTH_INCHES = 4.0
"""Of each chart, without what is beside it."""
LEFT_INCHES, RIGHT_INCHES = 0.75, 0.85
"""Beside each chart, for its scale and for what stands at the end of its curves."""
ABOVE_INCHES, BELOW_INCHES = 0.5, 0.5
"""Above and below each chart, for its title and its time scale."""
HEADER_INCHES = 0.85
LONGEST_TITLE = 52
THINNEST_POINTS, WIDER_POINTS = 1.6, 0.6


@dataclass(frozen=True)
class AxesGrid:
    """`axes` of equal size, row by row, on `figure`; all sizes in inches."""

    figure: Figure
    axes: Sequence[Axes]

    @classmethod
    def of(cls, count: int, height: float, width: float = WIDTH_INCHES) -> AxesGrid:
        """Room for `count` charts of `width` by `height`, at most COLUMNS in a row."""
        columns = min(COLUMNS, count)
        rows = math.ceil(count / columns)
        cell_width, cell_height = LEFT_INCHES + width + RIGHT_INCHES, ABOVE_INCHES + height + BELOW_INCHES
        total_width, total_height = columns * cell_width, HEADER_INCHES + rows * cell_height
        figure = Figure(figsize=(total_width, total_height), facecolor="white")
        axes = []
        for place in range(count):
            row, column = divmod(place, columns)
            left = column * cell_width + LEFT_INCHES
            bottom = total_height - HEADER_INCHES - (row + 1) * cell_height + BELOW_INCHES
            box = left / total_width, bottom / total_height, width / total_width, height / total_height
            axes.append(figure.add_axes(box))
        return cls(figure, axes)

    def draw_header(self, title: str, handles: Sequence[Artist]) -> None:
        """The figure's title, and beneath it the legend of the handles' labels in one row."""
        width, height = self.figure.get_size_inches()
        left = 0.15 / width
        self.figure.text(left, 1 - 0.36 / height, title, fontsize=13.5, fontweight="bold", color=INK)
        entries = [(handle, str(handle.get_label())) for handle in handles]
        anchor = left, 1 - 0.66 / height
        draw_legend_row(
            self.figure, entries, anchor, "center left", handlelength=2.0, handletextpad=0.6, columnspacing=1.6
        )


def line_widths(count: int) -> list[float]:
    """Widths in points of lines drawn upon each other: of those that run together the ones beneath are wider."""
    return [THINNEST_POINTS + WIDER_POINTS * above for above in reversed(range(count))]


def style(axes: Axes, title: str, subtitle: str) -> None:
    """Our look of a chart: its name above, thin lines of a grid, no frame."""
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT_INK)
    axes.tick_params(axis="both", which="both", colors=FAINT_INK, labelsize=8.5, length=0)
    axes.grid(which="major", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    above = axes.get_position().height * axes.figure.get_size_inches()[1]  # type: ignore[union-attr]
    title = printable(title, LONGEST_TITLE)
    axes.text(0, 1 + 0.26 / above, title, transform=axes.transAxes, fontsize=10, fontweight="bold", color=INK)
    axes.text(0, 1 + 0.09 / above, subtitle, transform=axes.transAxes, fontsize=8.5, color=FAINT_INK)


def logarithmic_seconds(axes: Axes, which: Literal["x", "y"], least_s: float, most_s: float) -> None:
    """A logarithmic scale on one axis, with plain numbers of seconds at 1 and 3 of each decade."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(least_s, most_s)
    decades = range(math.floor(math.log10(least_s)), math.ceil(math.log10(most_s)) + 1)
    ticks = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 3)]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if least_s <= tick <= most_s]))
    axis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g} s"))
    axis.set_minor_locator(NullLocator())
