"""Colours that people with any colour vision can tell apart (Okabe and Ito), and ink that is legible on them."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.colors import to_rgb


class OpLook(NamedTuple):
    """How ops of one kind look, and what the legend calls them."""

    colour: str
    label: str


OP_LOOKS = {
    "F": OpLook("#0072B2", "F  forward"),
    "B": OpLook("#E69F00", "B  backward input"),
    "W": OpLook("#009E73", "W  backward weight"),
    "BW": OpLook("#D55E00", "BW  backward, fused"),
    "O": OpLook("#CC79A7", "O  offload"),
    "R": OpLook("#56B4E9", "R  reload"),
}

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
    """The colour of an op whose stage is the `rank`-th of the `stages` on its device: later stages are lighter."""
    white = LIGHTEST * rank / (stages - 1) if stages > 1 else 0.0
    red, green, blue = to_rgb(OP_LOOKS[kind].colour)
    return (red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white)


def ink_on(colour: Rgb) -> str:
    """White or black, whichever has the higher contrast on `colour` (WCAG 2 relative luminance): at least 4.5."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "black"
