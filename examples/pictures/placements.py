"""Placements of stages on devices (docs/concepts/placements.md)."""

from __future__ import annotations

from examples.pictures.pipelines import INTERLEAVED, LINEAR, V_SHAPED, optimum, pipeline
from examples.pictures.sheet import Strip, figures_text, sheet
from optpipe.plot.panel import Panel

BUDGET_GIB = 3


def placements() -> Panel:
    """Draw the same work in one stage per device, in two interleaved ones, and in two along a V."""
    strips = []
    for name, placement in (("Linear", LINEAR), ("Interleaved", INTERLEAVED), ("V", V_SHAPED)):
        timed = optimum(pipeline(8, BUDGET_GIB, placement))
        strips.append(Strip(f"{name}: {figures_text(timed)}", timed, memory=(0, 3)))
    return sheet(strips)[0]


PICTURES = {"placements": placements}
