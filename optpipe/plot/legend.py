"""Legends: handles of curves, and the legend row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D

from optpipe.plot.style import CurveLook


def legend_lines(looks: Mapping[str, CurveLook], **more: Any) -> list[Line2D]:
    """Legend handle of each curve; `more` are matplotlib's line properties, such as `marker`."""
    return [
        Line2D([], [], color=look.colour, linestyle=look.dashes, linewidth=1.8, label=label, **more)
        for label, look in looks.items()
    ]


Handle = Artist | tuple[Artist, ...]
"""Legend handle; a tuple for several artists side by side."""


def draw_legend_row(
    owner: Axes | Figure, entries: Sequence[tuple[Handle, str]], anchor: tuple[float, float], loc: str, **lengths: float
) -> Legend:
    """Draw a one-row legend with its `loc` at `anchor`, in the owner's coordinates (0 to 1).

    `lengths` are matplotlib's, in font sizes: `handlelength`, `handletextpad`, `columnspacing`; `fontsize` in points.
    """
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "borderpad": 0, "borderaxespad": 0, **lengths}
    look |= {"loc": loc, "bbox_to_anchor": anchor, "ncols": len(entries)}
    handles, labels = zip(*entries, strict=True)
    return owner.legend(handles, labels, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, **look)
