"""Markdown tables, and a description of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from os import getloadavg
from pathlib import Path

from solver.limits import available_cores

Row = Sequence[str]


def table(head: Row, rows: Sequence[Row], text_columns: int) -> str:
    """Format a table with the first `text_columns` aligned left, the others right."""
    rule = ["---" if column < text_columns else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def time_text(time_us: float) -> str:
    """Format microseconds, with thousands separated, and a decimal unless they are whole."""
    return f"{time_us:,.{0 if float(time_us).is_integer() else 1}f}"


def seconds_text(seconds: float | None) -> str:
    """Format seconds with two decimals, or three below 0.1 s; a dash for None."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.3f}"


def conditions(command: str, time_limit_s: float) -> str:
    """Describe how a table was measured: command, machine, time limit of a run."""
    return f"`{command}`: {machine()}, at most {time_limit_s:g} s a run. Values are microseconds."


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
