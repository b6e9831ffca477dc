"""Makespan and device span (docs/concepts/objectives.md)."""

from __future__ import annotations

from collections.abc import Sequence

from examples.pictures.pipelines import optimum, pipeline
from examples.pictures.sheet import COMPUTE, Rows, Strip, sheet
from optpipe.plot.panel import Panel
from optpipe.plot.style import INK
from optpipe.problem import Objective
from optpipe.simulate import Simulation

TICK_INCHES = 0.05
NAMES: dict[Objective, str] = {"makespan": "makespan", "device_span": "device span"}


def both() -> Panel:
    """Draw the best schedule for each objective, with both measures marked on each."""
    strips = []
    for objective, name in NAMES.items():
        timed = optimum(pipeline(8, 7, objective=objective))
        strips.append(
            Strip(f"Least {name}: makespan {_ms(timed.makespan_us)}, device span {_ms(_span_us(timed))}", timed)
        )
    panel, layout = sheet(strips)
    for strip, rows in zip(strips, layout, strict=True):
        _mark(panel, strip.timed, rows)
    return panel


def _mark(panel: Panel, timed: Simulation, rows: Rows) -> None:
    """Draw a line from the first start to the last end of each device, and of all devices."""
    for device in range(len(timed.problem.devices)):
        mine = timed.device_slice(device)
        times = float(timed.start_us[mine].min()), float(timed.end_us[mine].max())
        lane = rows.lanes[device, COMPUTE]
        _bracket(panel, times, lane.bottom + 0.03)
        panel.text_right(lane.middle, f"span {_ms(timed.spans_us[device])}", fontsize=8.5)


def _bracket(panel: Panel, times_us: Sequence[float], y: float) -> None:
    start, end = (time / panel.unit.size for time in times_us)
    panel.axes.plot([start, end], [y, y], color=INK, linewidth=1.2, zorder=4, solid_capstyle="butt")
    for side in (start, end):
        panel.axes.plot([side, side], [y - TICK_INCHES, y], color=INK, linewidth=1.2, zorder=4)


def _span_us(timed: Simulation) -> float:
    return max(timed.spans_us)


def _ms(time_us: float) -> str:
    return f"{time_us / 1000:g} ms"


PICTURES = {"objectives": both}
