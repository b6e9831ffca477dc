"""`optpipe export`: a schedule for other tools."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from optpipe.cli.output import AsJson, check_writable, print_json, stdout, write_whole
from optpipe.cli.verify import ScheduleFile


class Format(StrEnum):
    """What a schedule can be exported to."""

    CHROME_TRACE = "chrome-trace"


def command(
    schedule: ScheduleFile,
    to: Annotated[Format, typer.Option("--to", help="chrome-trace: for Perfetto and chrome://tracing.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
    as_json: AsJson = False,
) -> int:
    """Write a schedule in the format of another tool."""
    from optpipe.export.chrome_trace import chrome_trace
    from optpipe.schedule import Schedule

    check_writable(output)
    write_whole(output, json.dumps(chrome_trace(Schedule.load(schedule)), allow_nan=False))
    print_json({"output": str(output), "to": str(to)}) if as_json else stdout().print(f"wrote {output}", markup=False)
    return 0
