"""Offload in one picture, for the front pages (docs/index.md, README.md)."""

from __future__ import annotations

from pathlib import Path

from examples.pictures.pipelines import optimum, published
from examples.pictures.sheet import Strip, figures_text, sheet
from optpipe.plot.panel import Panel
from optpipe.problem import Problem

PROBLEM = Path(__file__).parents[1] / "problems" / "offload-p4-m8.json"


def front() -> Panel:
    """Draw, within half of 1F1B's memory, the best published schedules without and with offload, and the optimum."""
    problem = Problem.load(PROBLEM)
    kept, offloaded, best = published(problem, "zb-auto"), published(problem, "ada-offload"), optimum(problem)
    strips = (
        Strip(f"Half of 1F1B's memory, Zero Bubble's heuristic: {figures_text(kept)}", kept, memory=(0,)),
        Strip(f"The same memory with offload, AdaOffload: {figures_text(offloaded)}", offloaded, memory=(0,)),
        Strip(f"The same memory with offload, optpipe solve: {figures_text(best)}, proved optimal", best, memory=(0,)),
    )
    return sheet(strips)[0]


PICTURES = {"front": front}
