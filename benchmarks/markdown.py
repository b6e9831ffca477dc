"""Markdown tables, and a description of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from os import getloadavg
from pathlib import Path

from optpipe.units import TIME_UNITS, Unit
from solver.limits import available_cores


class Time(float):
    """Microseconds in a cell, which `table` shows in the unit of all times of the table."""

    def text(self, unit: Unit) -> str:
        """The number of units, with thousands separated, and decimals that say something: four at most."""
        number = f"{self / unit.size:,.4f}"
        return number.rstrip("0").removesuffix(".")


Row = Sequence[str]
TimedRow = Sequence[str | Time]


def table(head: Row, rows: Sequence[TimedRow], text_columns: int) -> str:
    """Format a table with the first `text_columns` aligned left, the others right.

    The heads of columns of times name their unit.
    """
    columns = {column for row in rows for column, cell in enumerate(row) if isinstance(cell, Time)}
    unit = _unit([cell for row in rows for cell in row if isinstance(cell, Time)])
    named = [f"{name}, {unit.name}" if column in columns else name for column, name in enumerate(head)]
    texts = [[cell.text(unit) if isinstance(cell, Time) else cell for cell in row] for row in rows]
    rule = ["---" if column < text_columns else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (named, rule, *texts))


def _unit(times: Sequence[Time]) -> Unit:
    """Seconds where all times have one, else milliseconds where any has one: a table has instances of all sizes."""
    seconds, milliseconds, microseconds = TIME_UNITS
    if times and min(times) >= seconds.size:
        return seconds
    return milliseconds if max(times, default=0.0) >= milliseconds.size else microseconds


def seconds_text(seconds: float | None) -> str:
    """Format seconds with two decimals, or three below 0.1 s; a dash for None."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.3f}"


def conditions(command: str, time_limit_s: float, values: str = "") -> str:
    """Describe how a table was measured: command, machine, time limit of a run, and what values without a unit are."""
    return f"`{command}`: {machine()}, at most {time_limit_s:g} s a run.{values}"


def machine() -> str:
    """Describe the machine: cores, load, and the version of OptPipe.

    The load is the average of the last 15 minutes after the runs; on an otherwise idle machine it is about the number
    of cores in use.
    """
    cores = available_cores()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else "an unnamed processor"
    several = "s" * (cores != 1)
    return f"{cores} core{several} of {processor} at a load of {getloadavg()[2]:.1f}, version {version('optpipe')}"
