"""Figures as png, svg, pdf or html, and grids of charts. The same schedule always gives the same bytes."""

from __future__ import annotations

import html
import io
import math
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from optpipe.errors import InputError, Issue
from optpipe.plot.legend import draw_legend_row
from optpipe.plot.panel import printable
from optpipe.plot.style import FAINT_INK, GRID, INK

FORMATS = ("png", "svg", "pdf", "html")
PNG_DPI = 160
MOST_PIXELS = 30_000
"""Most pixels along a side of a png; the resolution is reduced to keep it, since matplotlib cannot draw 2^16."""

_SETTINGS = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica Neue", "Arial", "sans-serif"],
    "pdf.fonttype": 42,  # fonts are embedded as TrueType: publishers refuse Type 3
    "svg.fonttype": "none",
    "svg.hashsalt": "optpipe",
    "text.parse_math": False,
    "text.usetex": False,
}
_LOCK = threading.Lock()

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ margin: 1rem; background: white; }} svg {{ width: 100%; height: auto; }}</style>
</head>
<body>
{svg}</body>
</html>
"""


@contextmanager
def settings() -> Iterator[None]:
    """Context with the settings of all figures; restores the caller's.

    matplotlib's settings are global to the process, so one thread draws at a time.
    """
    with _LOCK, matplotlib.style.context(["default", _SETTINGS]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # missing glyphs are drawn as boxes
        yield


def format_of(path: Path) -> str:
    """Format of a file by its suffix. Raises InputError if it is not in FORMATS."""
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        allowed = ", ".join(f".{name}" for name in FORMATS)
        detail = (
            f"has the suffix {path.suffix!r}, but pictures end in {allowed}. Maybe name it {path.with_suffix('.svg')}."
        )
        raise InputError([Issue("", "unknown_format", detail)], str(path))
    return suffix


def encode(figure: Figure, picture_format: str, title: str) -> bytes:
    """Encode a figure in one of FORMATS; call within `settings`."""
    if picture_format == "png":
        png = io.BytesIO()
        FigureCanvasAgg(figure)
        dpi = min(PNG_DPI, MOST_PIXELS / max(figure.get_size_inches()))
        figure.savefig(png, format="png", dpi=dpi, metadata={"Software": "OptPipe"})
        return png.getvalue()
    if picture_format == "pdf":
        pdf = io.BytesIO()
        FigureCanvasPdf(figure)
        metadata = {"CreationDate": None, "Creator": "OptPipe", "Producer": None, "Title": title}
        figure.savefig(pdf, format="pdf", metadata=metadata)
        return pdf.getvalue()
    target = io.StringIO()
    FigureCanvasSVG(figure)
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": "OptPipe", "Title": title})
    svg = target.getvalue()
    if picture_format == "svg":
        return svg.encode()
    return _PAGE.format(title=html.escape(title), svg=svg[svg.index("<svg") :]).encode()


COLUMNS = 3
WIDTH_INCHES = 4.0
"""Width of each chart without its margins."""
LEFT_INCHES, RIGHT_INCHES = 0.75, 0.85
"""Margins left and right of each chart, for its scale and the labels at the ends of its curves."""
ABOVE_INCHES, BELOW_INCHES = 0.5, 0.5
"""Margins above and below each chart, for its title and its time scale."""
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
        """A new grid of `count` charts of `width` by `height`, at most COLUMNS in a row."""
        columns = min(COLUMNS, count)
        rows = math.ceil(count / columns)
        cell_width, cell_height = LEFT_INCHES + width + RIGHT_INCHES, ABOVE_INCHES + height + BELOW_INCHES
        total_width, total_height = columns * cell_width, HEADER_INCHES + rows * cell_height
        figure = Figure(figsize=(total_width, total_height), facecolor="white")
        axes = []
        for index in range(count):
            row, column = divmod(index, columns)
            left = column * cell_width + LEFT_INCHES
            bottom = total_height - HEADER_INCHES - (row + 1) * cell_height + BELOW_INCHES
            box = left / total_width, bottom / total_height, width / total_width, height / total_height
            axes.append(figure.add_axes(box))
        return cls(figure, axes)

    def draw_header(self, title: str, handles: Sequence[Artist]) -> None:
        """Draw the figure's title and, below it, the legend of the handles in one row."""
        width, height = self.figure.get_size_inches()
        left = 0.15 / width
        self.figure.text(left, 1 - 0.36 / height, title, fontsize=13.5, fontweight="bold", color=INK)
        entries = [(handle, str(handle.get_label())) for handle in handles]
        anchor = left, 1 - 0.66 / height
        draw_legend_row(
            self.figure, entries, anchor, "center left", handlelength=2.0, handletextpad=0.6, columnspacing=1.6
        )


def line_widths(count: int) -> list[float]:
    """Line widths in points for overlapping curves: lower ones are wider, so that all stay visible."""
    return [THINNEST_POINTS + WIDER_POINTS * above for above in reversed(range(count))]


def style(axes: Axes, title: str, subtitle: str) -> None:
    """Apply the common style to a chart: title above, thin grid lines, no frame."""
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
