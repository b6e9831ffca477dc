"""Figures: Gantt charts with memory curves, several schedules at one time scale, and plans for a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe import lazy

if TYPE_CHECKING:
    from optpipe.plot.comparison import draw_comparison, render_comparison
    from optpipe.plot.gantt import draw_schedule, render_schedule
    from optpipe.plot.plan import draw_plan, render_plan

__all__ = ["draw_comparison", "draw_plan", "draw_schedule", "render_comparison", "render_plan", "render_schedule"]

lazy.offer(
    __name__,
    {
        "draw_comparison": "optpipe.plot.comparison",
        "draw_plan": "optpipe.plot.plan",
        "draw_schedule": "optpipe.plot.gantt",
        "render_comparison": "optpipe.plot.comparison",
        "render_plan": "optpipe.plot.plan",
        "render_schedule": "optpipe.plot.gantt",
    },
)
