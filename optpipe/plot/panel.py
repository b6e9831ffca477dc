"""The panel on which lanes are drawn: time runs right in a unit that suits it, inches run down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import StrMethodFormatter

from optpipe.plot.colours import FAINT_INK, GRID, INK
from optpipe.units import Unit

POINTS_PER_INCH = 72
GUTTER_INCHES = 0.1
"""Between the panel and the text beside it."""
NARROWEST_INCHES, WIDEST_INCHES = 12.5, 22.0
"""Of a figure whose width follows the number of its boxes."""


class Lane(NamedTuple):
    """A horizontal strip: inches from the panel's top to its own top, and its height."""

    top: float
    height: float

    @property
    def middle(self) -> float:
        """Its height's half, from the top of the picture."""
        return self.top + self.height / 2

    @property
    def bottom(self) -> float:
        """Where it ends, from the top of the picture."""
        return self.top + self.height


class Margins(NamedTuple):
    """Inches around the panel."""

    left: float
    right: float
    top: float
    bottom: float


@dataclass(frozen=True)
class Panel:
    """Axes from `start_us` to `end_us`, `width` by `height` inches, with `margins` in the figure around it."""

    figure: Figure
    axes: Axes
    margins: Margins
    width: float
    height: float
    start_us: float
    end_us: float
    unit: Unit

    @classmethod
    def of(
        cls, figure_width: float, height: float, margins: Margins, start_us: float, end_us: float, unit: Unit
    ) -> Panel:
        """A new figure with an empty panel that is `height` inches high."""
        figure_height = height + margins.top + margins.bottom
        width = figure_width - margins.left - margins.right
        figure = Figure(figsize=(figure_width, figure_height), facecolor="white")
        FigureCanvasAgg(figure)  # measures all labels with one renderer, where a bare figure makes one for each
        axes = figure.add_axes(
            (
                margins.left / figure_width,
                margins.bottom / figure_height,
                width / figure_width,
                height / figure_height,
            )
        )
        end_us = end_us if end_us > start_us else start_us + unit.size
        axes.set_xlim(start_us / unit.size, end_us / unit.size)
        axes.set_ylim(height, 0)
        panel = cls(figure, axes, margins, width, height, start_us, end_us, unit)
        panel._draw_time_axis()
        return panel

    @property
    def points_per_us(self) -> float:
        """The scale of time: typographic points a microsecond."""
        return self.width * POINTS_PER_INCH / (self.end_us - self.start_us)

    def text_left(self, y: float, text: str, **look: object) -> Text:
        """Text beside the panel, ending at its left edge; `y` in inches from its top."""
        label = self._text(-GUTTER_INCHES, y, text, ha="right", va="center_baseline", **look)
        return _shrunk(label, self.margins.left - 2 * GUTTER_INCHES)

    def text_right(self, y: float, text: str, inches: float = GUTTER_INCHES, **look: object) -> Text:
        """Text beside the panel, from `inches` right of its right edge."""
        return self._text(self.width + inches, y, text, va="center_baseline", **look)

    def text_above(self, inches: float, text: str, **look: object) -> Text:
        """Text above the panel, from the figure's left margin."""
        line = self._text(GUTTER_INCHES - self.margins.left, -inches, text, va="baseline", **look)
        return _shrunk(line, self.margins.left + self.width + self.margins.right - 2 * GUTTER_INCHES)

    def _text(self, x: float, y: float, text: str, **look: object) -> Text:
        place = self.axes.get_yaxis_transform()
        options = {"color": INK, "clip_on": False, **look}
        return self.axes.text(x / self.width, y, text, transform=place, parse_math=False, **options)  # type: ignore[arg-type]

    def _draw_time_axis(self) -> None:
        axes = self.axes
        axes.set_yticks([])
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT_INK)
        axes.tick_params(axis="x", colors=FAINT_INK, labelsize=9)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        axes.grid(axis="x", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel(f"time ({self.unit.name})", color=FAINT_INK, fontsize=10)


def width_inches(most_ops: int) -> float:
    """The width of a figure: wider for more ops on a lane, so that boxes keep room for numbers as long as it can."""
    return min(WIDEST_INCHES, max(NARROWEST_INCHES, 5.0 + 0.165 * most_ops))


def _shrunk(text: Text, room_inches: float) -> Text:
    """The text, smaller where it is wider than its room."""
    figure = text.get_figure(root=True)
    assert figure is not None
    width_inches = text.get_window_extent().width / figure.dpi
    if width_inches > room_inches:
        text.set_fontsize(float(text.get_fontsize()) * room_inches / width_inches)
    return text


def printable(text: str, most: int) -> str:
    """A name fit for a label: one line without control characters, at most `most` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else line[: most - 1] + "…"
