"""The memory of one device over time, with its budget, on a strip of the panel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from optpipe.memory import planned_memory
from optpipe.plot.colours import BUDGET, MEMORY_EDGE, MEMORY_FILL
from optpipe.plot.panel import Lane, Panel
from optpipe.schedule import Schedule
from optpipe.units import Unit, bytes_text, memory_unit

HEADROOM = 1.06
FARTHEST_BUDGET = 3.0
"""A budget beyond this many times the highest peak is named but not drawn: the curves would be flat."""


@dataclass(frozen=True)
class MemoryScale:
    """One scale for all devices, so that their strips can be compared: `top_bytes` is at the top of a strip."""

    top_bytes: float

    @classmethod
    def of(cls, schedule: Schedule) -> MemoryScale:
        """The scale that shows every device's peak, and the budgets that are not far above the highest."""
        peak = max(plan.peak_bytes for plan in schedule.devices)
        budgets = [device.memory_bytes or 0 for device in schedule.problem.devices]
        drawn = [budget for budget in budgets if budget <= FARTHEST_BUDGET * peak]
        return cls(HEADROOM * max([peak, *drawn, 1]))

    def shows(self, budget_bytes: int | None) -> TypeGuard[int]:
        """Whether the line of a budget is within the strips."""
        return budget_bytes is not None and budget_bytes <= self.top_bytes

    @property
    def unit(self) -> Unit:
        """What bytes are shown in."""
        return memory_unit(self.top_bytes / HEADROOM)


def draw_memory(panel: Panel, strip: Lane, schedule: Schedule, device: int, scale: MemoryScale) -> None:
    """The step curve at the predicted times, and the budget as a dashed line."""
    levels = planned_memory(schedule, device)
    times = np.concatenate([[panel.start_us], levels.times_us, [panel.end_us]]) / panel.unit.size
    sizes = np.concatenate([[0], levels.bytes, levels.bytes[-1:]])
    heights = strip.bottom - strip.height * sizes / scale.top_bytes
    axes = panel.axes
    axes.fill_between(times, heights, strip.bottom, step="post", color=MEMORY_FILL, linewidth=0, zorder=2)
    axes.step(times, heights, where="post", color=MEMORY_EDGE, linewidth=0.8, zorder=3)
    axes.plot(times[[0, -1]], [strip.bottom] * 2, color=MEMORY_EDGE, linewidth=0.8, zorder=3)
    budget = schedule.problem.devices[device].memory_bytes
    if scale.shows(budget):
        y = strip.bottom - strip.height * budget / scale.top_bytes
        axes.plot(times[[0, -1]], [y] * 2, color=BUDGET, linewidth=1.1, linestyle=(0, (5, 3)), zorder=4)


def peak_text(peak_bytes: int, budget_bytes: int | None, scale: MemoryScale) -> str:
    """A peak beside its budget, both in the unit of the scale unless the budget is far beyond it."""
    peak = f"peak {bytes_text(peak_bytes, scale.unit)}"
    if budget_bytes is None:
        return f"{peak}, no limit"
    return f"{peak} of {bytes_text(budget_bytes, scale.unit if scale.shows(budget_bytes) else None)}"
