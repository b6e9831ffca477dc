"""A legend in one row without a frame: the one look that all pictures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple

Handle = Artist | tuple[Artist, ...]
"""What stands before a label; several artists side by side as a tuple."""


def draw_legend_row(
    owner: Axes | Figure, entries: Sequence[tuple[Handle, str]], anchor: tuple[float, float], loc: str, **lengths: float
) -> None:
    """Handles with their labels, `loc` of the row at `anchor` in the owner's own coordinates (0 to 1).

    `lengths` are matplotlib's, in font sizes: `handlelength`, `handletextpad`, `columnspacing`.
    """
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "borderpad": 0, "borderaxespad": 0, **lengths}
    look |= {"loc": loc, "bbox_to_anchor": anchor, "ncols": len(entries)}
    handles, labels = zip(*entries, strict=True)
    owner.legend(handles, labels, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, **look)
