"""Colours and dashes by which curves are told apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import cycle, islice
from typing import Any, NamedTuple

from matplotlib.lines import Line2D

from optpipe.plot.colours import OP_LOOKS


class CurveLook(NamedTuple):
    """How a curve is drawn: matplotlib's offset and lengths of dashes and gaps in points, none for a solid line."""

    colour: str
    dashes: tuple[float, tuple[float, ...]]


_COLOURS = [OP_LOOKS[kind].colour for kind in ("F", "BW", "W", "O", "B", "R")]
_DASHES: list[tuple[float, tuple[float, ...]]] = [(0, ()), (0, (5, 2)), (0, (1.5, 1.5))]


def curve_looks(labels: Iterable[str]) -> dict[str, CurveLook]:
    """A look for each label in order of appearance: another colour each, then the same colours dashed."""
    names = list(dict.fromkeys(labels))
    looks = (CurveLook(colour, dashes) for dashes in cycle(_DASHES) for colour in _COLOURS)
    return dict(zip(names, islice(looks, len(names)), strict=True))


def legend_lines(looks: Mapping[str, CurveLook], **more: Any) -> list[Line2D]:
    """A labelled piece of each curve for a legend; `more` are matplotlib's properties of a line, such as `marker`."""
    return [
        Line2D([], [], color=look.colour, linestyle=look.dashes, linewidth=1.8, label=label, **more)
        for label, look in looks.items()
    ]
