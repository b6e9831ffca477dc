"""Figures of schedules: Gantt charts with memory curves, and several schedules at one time scale."""

from optpipe.plot.comparison import draw_comparison, render_comparison
from optpipe.plot.gantt import draw_schedule, render_schedule

__all__ = ["draw_comparison", "draw_schedule", "render_comparison", "render_schedule"]
