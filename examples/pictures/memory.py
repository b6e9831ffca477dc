"""Memory of a device over time on a strip; memory above the budget has the budget's colour."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optpipe.plot.panel import Lane, Panel
from optpipe.plot.style import BUDGET, FAINT_INK, MEMORY_EDGE, MEMORY_FILL
from optpipe.simulate import Floats, Simulation
from optpipe.units import bytes_text, memory_unit

HEADROOM = 1.04


def highest_bytes(timed: Simulation, devices: Sequence[int]) -> int:
    """Largest budget or peak of these devices."""
    budgets = [timed.problem.devices[device].memory_bytes or 0 for device in devices]
    return max([*budgets, *(timed.device_memory(device).peak_bytes for device in devices)], default=0)


def draw_memory(panel: Panel, strip: Lane, timed: Simulation, device: int, top_bytes: int) -> None:
    """Draw the memory curve, and the budget as a dashed line; `top_bytes` is at the top of the strip."""
    curve = timed.device_memory(device)
    times = np.concatenate([[0.0], curve.times_us, [timed.end_us.max()]]) / panel.unit.size
    sizes = np.concatenate([[0.0], curve.bytes, curve.bytes[-1:]])
    heights = _heights(strip, sizes, top_bytes)
    axes = panel.axes
    axes.fill_between(times, heights, strip.bottom, step="post", color=MEMORY_FILL, linewidth=0, zorder=2)
    axes.step(times, heights, where="post", color=MEMORY_EDGE, linewidth=0.8, zorder=3)
    panel.text_left(strip.middle, "memory", fontsize=7.5, color=FAINT_INK)
    budget = timed.problem.devices[device].memory_bytes
    if budget is None:
        panel.text_right(strip.middle, f"peak {_short(curve.peak_bytes, top_bytes)}", fontsize=8.5, color=FAINT_INK)
        return
    line = _heights(strip, np.full_like(sizes, budget), top_bytes)
    above = np.minimum(heights, line)
    axes.fill_between(times, above, line, step="post", color=BUDGET, linewidth=0, zorder=3)
    axes.plot(times[[0, -1]], line[[0, -1]], color=BUDGET, linewidth=1.1, linestyle=(0, (5, 3)), zorder=4)
    over = curve.peak_bytes > budget
    text = f"peak {_short(curve.peak_bytes, top_bytes).split()[0]} of {_short(budget, top_bytes)}"
    weight = "bold" if over else "normal"
    panel.text_right(strip.middle, text, fontsize=8.5, color=BUDGET if over else FAINT_INK, fontweight=weight)


def _heights(strip: Lane, sizes: Floats, top_bytes: int) -> Floats:
    heights: Floats = strip.bottom - strip.height * sizes / (HEADROOM * top_bytes)
    return heights


def _short(size_bytes: int, top_bytes: int) -> str:
    """Format a size in the unit of the strip, without trailing zeros."""
    number, name = bytes_text(size_bytes, memory_unit(top_bytes)).split()
    return f"{float(number):g} {name}"
