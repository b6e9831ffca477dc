"""Style of all figures: colours (Okabe and Ito) and dashes of curves. The page has them too, without matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle, islice
from typing import NamedTuple

from optpipe.kinds import KIND, look_of

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
    red, green, blue = (entry / 255 for entry in bytes.fromhex(look_of(kind).colour[1:]))
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
