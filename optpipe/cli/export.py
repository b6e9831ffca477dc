"""`optpipe export`: a schedule, or a measured step, for other tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.output import AsJson, check_writable, print_json, stderr, stdout, write_whole
from optpipe.errors import InputError, Issue

if TYPE_CHECKING:
    from optpipe.schedule import Schedule
    from optpipe.trace import Trace


class Format(StrEnum):
    """What can be exported to."""

    CHROME_TRACE = "chrome-trace"
    TORCH_CSV = "torch-csv"


DropOffload = Annotated[
    bool,
    typer.Option(
        "--drop-offload",
        help="torch-csv: leave out offloads and reloads, which torch cannot run; says which memory that needs.",
    ),
]


def command(
    schedule: Annotated[
        Path,
        typer.Argument(
            help="A schedule (optpipe.schedule/1), or for chrome-trace also a measured step (optpipe.trace/1).",
            metavar="SCHEDULE.json",
        ),
    ],
    to: Annotated[
        Format,
        typer.Option(
            "--to",
            help="chrome-trace: for Perfetto and chrome://tracing. "
            "torch-csv: for torch's own pipelining runtime, torchtitan and NeMo AutoModel.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
    drop_offload: DropOffload = False,
    as_json: AsJson = False,
) -> int:
    """Write a schedule, or a measured step of it, in the format of another tool."""
    if drop_offload and to is not Format.TORCH_CSV:
        detail = f"is given with --to {to}, which shows offloads. Maybe leave it out."
        raise InputError([Issue("--drop-offload", "nothing_to_drop", detail)])
    check_writable(output)
    document: dict[str, object] = {"output": str(output), "to": str(to)}
    loaded = _load(schedule)
    if to is Format.CHROME_TRACE:
        write_whole(output, _chrome_trace_text(loaded))
    else:
        loaded = _a_schedule(loaded, schedule)
        write_whole(output, _torch_csv_text(loaded, drop_offload))
        if drop_offload:
            document["devices"] = _memory_without_offload(loaded)
    print_json(document) if as_json else stdout().print(f"wrote {output}")
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


def _a_schedule(loaded: Schedule | Trace, path: Path) -> Schedule:
    from optpipe.trace import Trace

    if isinstance(loaded, Trace):
        detail = (
            "is torch-csv, but this is a measured step. Maybe export the schedule that it ran, or use chrome-trace."
        )
        raise InputError([Issue("--to", "not_a_schedule", detail)], str(path))
    return loaded


def _chrome_trace_text(loaded: Schedule | Trace) -> str:
    from optpipe.export.chrome_trace import chrome_trace
    from optpipe.export.measured_chrome_trace import measured_chrome_trace
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
