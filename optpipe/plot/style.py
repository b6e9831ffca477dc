"""Style of all figures: colours (Okabe and Ito), dashes of curves, the legend row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D

from optpipe.kinds import KIND

IDLE = "#E9ECEF"
GRID = "#D3D8DE"
INK = "#1B1F24"
FAINT_INK = "#5B6470"
MEMORY_FILL = "#B9C2CE"
MEMORY_EDGE = "#4A5564"
BUDGET = "#9B1C31"

LIGHTEST = 0.6
"""Share of white in the last of a device's stages."""

Rgb = tuple[float, float, float]

WHITE: Rgb = (1.0, 1.0, 1.0)


def op_colour(kind: str, rank: int, stages: int) -> Rgb:
    """Colour of an op whose stage is the `rank`-th of `stages` on its device: later stages are lighter."""
    white = LIGHTEST * rank / (stages - 1) if stages > 1 else 0.0
    red, green, blue = to_rgb(KIND[kind].colour)
    return (red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white)


def ink_on(colour: Rgb) -> str:
    """White or black, whichever has the higher contrast on `colour` (WCAG 2 relative luminance): at least 4.5."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "black"


class CurveLook(NamedTuple):
    """Colour and dashes of a curve: matplotlib's offset and on/off lengths in points, empty for a solid line."""

    colour: str
    dashes: tuple[float, tuple[float, ...]]


_COLOURS = [KIND[kind].colour for kind in ("F", "BW", "W", "O", "B", "R")]
_DASHES: list[tuple[float, tuple[float, ...]]] = [(0, ()), (0, (5, 2)), (0, (1.5, 1.5))]


def curve_looks(labels: Iterable[str]) -> dict[str, CurveLook]:
    """Assign a look to each label in order of appearance: distinct colours first, then the same colours dashed."""
    names = list(dict.fromkeys(labels))
    looks = (CurveLook(colour, dashes) for dashes in cycle(_DASHES) for colour in _COLOURS)
    return dict(zip(names, islice(looks, len(names)), strict=True))


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
) -> None:
    """Draw a one-row legend with its `loc` at `anchor`, in the owner's coordinates (0 to 1).

    `lengths` are matplotlib's, in font sizes: `handlelength`, `handletextpad`, `columnspacing`.
    """
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "borderpad": 0, "borderaxespad": 0, **lengths}
    look |= {"loc": loc, "bbox_to_anchor": anchor, "ncols": len(entries)}
    handles, labels = zip(*entries, strict=True)
    owner.legend(handles, labels, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, **look)
