"""`optpipe export`: a schedule, a measured step, or the model of a problem, for other tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optpipe.cli.console import AsJson, compile_once, doing, print_json, stderr, stdout
from optpipe.errors import InputError, Issue
from optpipe.files import check_writable, write_atomically

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule
    from optpipe.trace import Trace


class Format(StrEnum):
    """What can be exported to."""

    CHROME_TRACE = "chrome-trace"
    TORCH_CSV = "torch-csv"
    LP = "lp"
    MPS = "mps"


DropOffload = Annotated[
    bool,
    typer.Option(
        "--drop-offload",
        help="torch-csv: leave out offloads and reloads, which torch cannot run; says which memory that needs.",
    ),
]


def command(
    document: Annotated[
        Path,
        typer.Argument(
            help="A schedule (optpipe.schedule/1); for chrome-trace also a measured step (optpipe.trace/1), for lp and "
            "mps also a problem (optpipe.problem/1).",
            metavar="FILE.json",
        ),
    ],
    to: Annotated[
        Format,
        typer.Option(
            "--to",
            help="chrome-trace: for Perfetto and chrome://tracing. "
            "torch-csv: for torch's own pipelining runtime, torchtitan and NeMo AutoModel. "
            "lp, mps: the problem as a mixed-integer model, for other solvers.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
    drop_offload: DropOffload = False,
    as_json: AsJson = False,
) -> int:
    """Write a schedule, a measured step of it, or the model of its problem, in the format of another tool."""
    if drop_offload and to is not Format.TORCH_CSV:
        detail = f"is given with --to {to}, which shows offloads. Maybe leave it out."
        raise InputError([Issue("--drop-offload", "nothing_to_drop", detail)])
    check_writable(output)
    written: dict[str, object] = {"output": str(output), "to": str(to)}
    summary = f"wrote {output}"
    if to is Format.LP or to is Format.MPS:
        figures = _write_model(_load_problem(document), to, output)
        written |= figures
        summary += ": {rows:,} rows, {columns:,} columns, {integer_columns:,} of them integer".format(**figures)
    elif to is Format.CHROME_TRACE:
        write_atomically(output, _chrome_trace_text(_load(document)))
    else:
        schedule = _load_schedule(document)
        write_atomically(output, _torch_csv_text(schedule, drop_offload))
        if drop_offload:
            written["devices"] = _memory_without_offload(schedule)
    print_json(written) if as_json else stdout().print(summary)
    return 0


def _load(path: Path) -> Schedule | Trace:
    """The document that the file says it is. Raises InputError."""
    from optpipe.document import read_document
    from optpipe.schedule import Schedule
    from optpipe.trace import Trace
    from optpipe.trace.document import MAX_TRACE_BYTES

    hint = "is a problem but a schedule or a measured step is needed. Maybe run 'optpipe solve' on it first."
    data = read_document(path, MAX_TRACE_BYTES, {"optpipe.problem/": hint})
    measured = isinstance(data, dict) and str(data.get("format", "")).startswith("optpipe.trace/")
    return (Trace if measured else Schedule).from_data(data, str(path))


def _load_schedule(path: Path) -> Schedule:
    from optpipe.trace import Trace

    loaded = _load(path)
    if isinstance(loaded, Trace):
        detail = (
            "is torch-csv, but this is a measured step. Maybe export the schedule that it ran, or use chrome-trace."
        )
        raise InputError([Issue("--to", "not_a_schedule", detail)], str(path))
    return loaded


def _load_problem(path: Path) -> Problem:
    """Load a problem, or that of a schedule. Raises InputError."""
    from optpipe.document import read_document
    from optpipe.problem import Problem
    from optpipe.schedule import MAX_SCHEDULE_BYTES, Schedule

    hint = "is a measured step but a problem or a schedule is needed. Maybe give the schedule that it ran."
    data = read_document(path, MAX_SCHEDULE_BYTES, {"optpipe.trace/": hint})
    if isinstance(data, dict) and str(data.get("format", "")).startswith("optpipe.schedule/"):
        return Schedule.from_data(data, str(path)).problem
    return Problem.from_data(data, str(path))


def _write_model(problem: Problem, to: Literal[Format.LP, Format.MPS], output: Path) -> dict[str, float]:
    """Write the mixed-integer model, and return its size and the unit of its times."""
    from solver.model_export import export_model

    compile_once()
    with doing("stating the model"):
        statement = export_model(problem)
        write_atomically(output, statement.to_text("lp" if to is Format.LP else "mps"))
    return {
        "rows": statement.rows,
        "columns": statement.columns,
        "integer_columns": statement.integer_columns,
        "time_unit_us": statement.time_unit_us,
    }


def _chrome_trace_text(loaded: Schedule | Trace) -> str:
    from optpipe.export.chrome_trace import chrome_trace, measured_chrome_trace
    from optpipe.trace import Trace

    events = measured_chrome_trace(loaded) if isinstance(loaded, Trace) else chrome_trace(loaded)
    return json.dumps(events, allow_nan=False)


def _torch_csv_text(schedule: Schedule, drop_offload: bool) -> str:
    from optpipe.export.torch_csv import torch_csv

    return torch_csv(schedule, drop_offload=drop_offload)


def _memory_without_offload(schedule: Schedule) -> Sequence[dict[str, int | None]]:
    """What each device needs when nothing leaves it, also said on stderr, and what it has."""
    from optpipe.export.torch_csv import peak_bytes_without_offload

    needs = peak_bytes_without_offload(schedule)
    budgets = [device.memory_bytes for device in schedule.problem.devices]
    for d, (need, budget) in enumerate(zip(needs, budgets, strict=True)):
        limit = "no limit" if budget is None else f"{budget:,} bytes"
        over = f", {need - budget:,} too few" if budget is not None and need > budget else ""
        stderr().print(f"device {d} needs {need:,} bytes without offload (budget: {limit}{over})")
    return [{"peak_bytes_any_timing": n, "memory_bytes": b} for n, b in zip(needs, budgets, strict=True)]
