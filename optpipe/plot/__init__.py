"""Figures of schedules: Gantt charts with memory curves, and several schedules at one time scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe import lazy

if TYPE_CHECKING:
    from optpipe.plot.comparison import draw_comparison, render_comparison
    from optpipe.plot.gantt import draw_schedule, render_schedule

__all__ = ["draw_comparison", "draw_schedule", "render_comparison", "render_schedule"]

lazy.offer(
    __name__,
    {
        "draw_comparison": "optpipe.plot.comparison",
        "draw_schedule": "optpipe.plot.gantt",
        "render_comparison": "optpipe.plot.comparison",
        "render_schedule": "optpipe.plot.gantt",
    },
)
