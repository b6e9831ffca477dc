"""Schedules and problems that commands read: documents of the program, and torch's schedule CSV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from optpipe.cli.console import stderr
from optpipe.document_kinds import TORCH_CSV, kind_of_text
from optpipe.errors import InputError, Issue

if TYPE_CHECKING:
    from optpipe.document import Document
    from optpipe.schedule import Schedule

D = TypeVar("D", bound="Document")

ProblemOfCsv = Annotated[
    Path | None,
    typer.Option(
        "--problem",
        help="Problem with the costs and budgets of a schedule CSV of torch; default: 1 ms for each F, B and W, 1,000 "
        "bytes an activation.",
        metavar="PROBLEM.json",
    ),
]


def load_schedule(path: Path, problem: Path | None) -> Schedule:
    """Load a schedule, or torch's schedule CSV with the costs of `problem`. Raises InputError."""
    from optpipe.schedule import Schedule

    return _load_torch_csv(path, problem) or Schedule.load(path)


def load_schedule_or(other: type[D], path: Path, problem: Path | None) -> Schedule | D:
    """Load a schedule as `load_schedule` does, or a document of another class: Problem or Trace. Raises InputError."""
    from optpipe.document import read_document
    from optpipe.schedule import Schedule
    from optpipe.trace.document import MAX_TRACE_BYTES

    if loaded := _load_torch_csv(path, problem):
        return loaded
    name = other.__name__.lower()
    data = read_document(path, MAX_TRACE_BYTES, name, "schedule")
    is_other = isinstance(data, dict) and str(data.get("format", "")).startswith(f"optpipe.{name}/")
    return other.from_data(data, str(path)) if is_other else Schedule.from_data(data, str(path))


def is_torch_csv(path: Path) -> bool:
    """True for a file with actions of torch in its first line, or named as a CSV."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".csv" or kind_of_text(file.read(4096)) is TORCH_CSV


def _load_torch_csv(path: Path, problem: Path | None) -> Schedule | None:
    """Read torch's CSV, and say on stderr what was assumed and what was left out; None for another file."""
    from optpipe.document import read_bounded
    from optpipe.export.torch_csv import ACTIVATION_BYTES, MAX_CSV_BYTES, OP_US, read_torch_csv
    from optpipe.problem import Problem

    if not is_torch_csv(path):
        if problem is not None and path.exists():
            detail = f"gives costs to a schedule CSV of torch, but {path} is none. Maybe leave it out."
            raise InputError([Issue("--problem", "meaningless", detail)])
        return None
    costs = None if problem is None else Problem.load(problem)
    found = read_torch_csv(read_bounded(path, MAX_CSV_BYTES), str(path), costs)
    console = stderr()
    if costs is None:
        console.print(
            f"{path.name} has no costs: taken are {OP_US / 1000:g} ms for each F, B and W, and {ACTIVATION_BYTES:,} "
            "bytes an activation (--problem gives others)"
        )
    if found.overlapped:
        console.print(f"{found.overlapped:,} pairs (OVERLAP_F_B) are read one half after the other")
    if found.dropped:
        console.print(f"{found.dropped:,} actions that are no compute (sends, receives, gathers) are left out")
    return found.schedule
