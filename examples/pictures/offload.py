"""Offload, and k (docs/concepts/offload.md)."""

from __future__ import annotations

from examples.pictures.pipelines import optimum, pipeline
from examples.pictures.sheet import Strip, figures_text, sheet
from optpipe.plot.panel import Panel

BUDGET_GIB = 2


def with_and_without() -> Panel:
    """Draw schedules within one budget, without and with offload."""
    strips = []
    for words, k in (("Nothing leaves", None), ("Activations may leave", 2 / 3)):
        timed = optimum(pipeline(8, BUDGET_GIB, k=k))
        strips.append(Strip(f"{words}: {figures_text(timed)}", timed, memory=(0,)))
    return sheet(strips)[0]


def by_k() -> Panel:
    """Draw the first device with copies faster than compute, as fast, and slower."""
    strips = []
    for k in (0.5, 1, 2):
        timed = optimum(pipeline(8, BUDGET_GIB, k=k))
        strips.append(Strip(f"k = {k:g}: {figures_text(timed)}", timed, devices=(0,), memory=(0,)))
    return sheet(strips)[0]


PICTURES = {"offload": with_and_without, "offload-by-k": by_k}
