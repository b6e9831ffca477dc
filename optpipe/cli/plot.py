"""`optpipe plot`: a schedule as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optpipe.cli.output import AsJson, check_writable, print_json, stdout
from optpipe.cli.verify import ScheduleFile


def command(
    schedule: ScheduleFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="The picture: .png, .svg or .html.")],
    as_json: AsJson = False,
) -> int:
    """Draw a schedule: a Gantt chart with each device's memory and its budget."""
    from optpipe.plot import draw_schedule
    from optpipe.schedule import Schedule

    check_writable(output)
    draw_schedule(Schedule.load(schedule), output)
    print_json({"output": str(output)}) if as_json else stdout().print(f"wrote {output}")
    return 0
