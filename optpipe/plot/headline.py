"""What stands above a picture: the problem's name and the schedule's figures."""

from __future__ import annotations

from optpipe.plot.panel import printable
from optpipe.schedule import Schedule
from optpipe.units import count_text, percent_text, time_text, time_unit

OBJECTIVE_NAMES = {"makespan": "makespan", "device_span": "device span"}
LONGEST_TITLE = 70


def title_text(schedule: Schedule) -> str:
    """The problem's name, or its size where it has none."""
    problem = schedule.problem
    size = f"{count_text(len(problem.devices), 'device')}, {count_text(problem.microbatches, 'microbatch')}"
    name = printable(problem.name, LONGEST_TITLE)
    return f"{name}: {size}" if name else size[0].upper() + size[1:]


def figures_text(schedule: Schedule) -> str:
    """Method, status, value, bound, gap and bubble on one line."""
    unit = time_unit(schedule.value_us)
    return "   ·   ".join(
        (
            printable(schedule.method, 30),
            schedule.status,
            f"{OBJECTIVE_NAMES[schedule.objective]} {time_text(schedule.value_us, unit)}",
            f"bound {time_text(schedule.bound_us, unit)}",
            f"gap {percent_text(schedule.gap)}",
            f"bubble {percent_text(schedule.bubble)}",
        )
    )
