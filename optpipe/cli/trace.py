"""`optpipe trace`: a measured step against its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optpipe.cli.output import AsJson, check_writable, print_json, stdout

TraceFile = Annotated[
    Path, typer.Argument(help="A measured step (optpipe.trace/1), from 'optpipe train --trace'.", metavar="TRACE.json")
]


def command(
    trace: TraceFile,
    plot: Annotated[Path | None, typer.Option(help="Also draw both at one time scale (png, svg, html).")] = None,
    as_json: AsJson = False,
) -> int:
    """Compare a measured step with its schedule: time, bubble, memory, copies, and the ops that differ most.

    Measured times count where each device had a process of its own. Where devices shared one, they took turns, and the
    schedule is timed anew with the durations that were measured; the output says which of the two it shows.
    """
    from optpipe.cli.trace_report import document, print_comparison
    from optpipe.trace.compare import compare
    from optpipe.trace.document import Trace

    if plot:
        from optpipe.plot.output import format_of

        format_of(plot)
        check_writable(plot)
    loaded = Trace.load(trace)
    comparison = compare(loaded)
    if plot:
        from optpipe.plot.planned_and_measured import draw_planned_and_measured

        draw_planned_and_measured(loaded, comparison, plot)
    if as_json:
        print_json(document(comparison))
    else:
        print_comparison(loaded, comparison)
        if plot:
            stdout().print(f"wrote {plot}")
    return 0
