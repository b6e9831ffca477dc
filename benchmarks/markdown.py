"""Tables and figures of a machine as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from os import getloadavg
from pathlib import Path

from optpipe.units import number_text
from solver.limits import available_cores

Row = Sequence[str]


def table(head: Row, rows: Sequence[Row], text_columns: int) -> str:
    """A table whose first `text_columns` stand to the left, the others to the right."""
    rule = ["---" if place < text_columns else "---:" for place in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def time_text(time_us: float) -> str:
    """Microseconds, with thousands separated."""
    return number_text(time_us, 1)


def seconds_text(seconds: float | None) -> str:
    """Seconds with two decimals, three where there are few; a dash where a moment never came."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.3f}"


def conditions(command: str, time_limit_s: float) -> str:
    """What every number above was measured with: the command, the machine, the limit of a run."""
    return f"`{command}`: {machine()}, at most {time_limit_s:g} s a run. Values are microseconds."


def machine() -> str:
    """The cores and how busy they are, and the version of what runs on them.

    The load is that of the last 15 minutes at the end of the runs; on an idle machine it is about the cores in use.
    """
    cores = available_cores()
    several = "s" * (cores != 1)
    return f"{cores} core{several} of {_processor()} at a load of {getloadavg()[2]:.1f}, version {version('optpipe')}"


def _processor() -> str:
    """The processor's name, as Linux gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "an unnamed processor"
