"""`optpipe export`: a schedule for other tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.output import AsJson, check_writable, print_json, stderr, stdout, write_whole
from optpipe.cli.verify import ScheduleFile
from optpipe.errors import InputError, Issue

if TYPE_CHECKING:
    from optpipe.schedule import Schedule


class Format(StrEnum):
    """What a schedule can be exported to."""

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
    schedule: ScheduleFile,
    to: Annotated[
        Format,
        typer.Option(
            "--to",
            help="chrome-trace: for Perfetto and chrome://tracing. "
            "torch-csv: for the runtime of torch.distributed.pipelining, torchtitan and NeMo AutoModel.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
    drop_offload: DropOffload = False,
    as_json: AsJson = False,
) -> int:
    """Write a schedule in the format of another tool."""
    from optpipe.schedule import Schedule

    if drop_offload and to is not Format.TORCH_CSV:
        detail = f"is given with --to {to}, which shows offloads. Maybe leave it out."
        raise InputError([Issue("--drop-offload", "nothing_to_drop", detail)])
    check_writable(output)
    loaded = Schedule.load(schedule)
    write_whole(output, _text(loaded, to, drop_offload))
    document: dict[str, object] = {"output": str(output), "to": str(to)}
    if drop_offload:
        document["devices"] = _memory_without_offload(loaded)
    print_json(document) if as_json else stdout().print(f"wrote {output}", markup=False)
    return 0


def _text(schedule: Schedule, to: Format, drop_offload: bool) -> str:
    if to is Format.TORCH_CSV:
        from optpipe.export.torch_csv import torch_csv

        return torch_csv(schedule, drop_offload=drop_offload)
    from optpipe.export.chrome_trace import chrome_trace

    return json.dumps(chrome_trace(schedule), allow_nan=False)


def _memory_without_offload(schedule: Schedule) -> Sequence[dict[str, int | None]]:
    """What each device needs when nothing leaves it, also said on stderr, and what it has."""
    from optpipe.export.torch_csv import peak_bytes_without_offload

    needs = peak_bytes_without_offload(schedule)
    budgets = [device.memory_bytes for device in schedule.problem.devices]
    for d, (need, budget) in enumerate(zip(needs, budgets, strict=True)):
        limit = "no limit" if budget is None else f"{budget:,} bytes"
        over = f", {need - budget:,} too few" if budget is not None and need > budget else ""
        stderr().print(f"device {d} needs {need:,} bytes without offload (budget: {limit}{over})", markup=False)
    return [{"peak_bytes_any_timing": n, "memory_bytes": b} for n, b in zip(needs, budgets, strict=True)]
