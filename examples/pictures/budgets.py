"""Memory budgets (docs/concepts/memory.md)."""

from __future__ import annotations

from examples.pictures.pipelines import optimum, pipeline
from examples.pictures.sheet import Strip, figures_text, sheet
from optpipe.plot.panel import Panel


def budgets() -> Panel:
    """Draw the least device span of eight microbatches within three budgets."""
    strips = []
    for budget_gib in (2, 4, 7):
        timed = optimum(pipeline(8, budget_gib, objective="device_span"))
        strips.append(Strip(f"{budget_gib} GiB a device: span {figures_text(timed)}", timed, memory=(0,)))
    return sheet(strips)[0]


PICTURES = {"budgets": budgets}
