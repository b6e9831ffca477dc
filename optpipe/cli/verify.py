"""`optpipe verify` and `optpipe plot`: checks a schedule from its document alone, and draws it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optpipe.cli.console import AsJson, PrintWidth, answer, check_picture, print_json, stdout, table
from optpipe.cli.documents import ProblemOfCsv, load_schedule
from optpipe.units import share_text, us_text

ScheduleFile = Annotated[
    Path,
    typer.Argument(help="A schedule (optpipe.schedule/1), or a schedule CSV of torch.", metavar="SCHEDULE.json"),
]

SHOWN_VIOLATIONS = 20


def command(schedule: ScheduleFile, problem: ProblemOfCsv = None, as_json: AsJson = False) -> int:
    """Check every rule, budget and figure of a schedule. Exit code 1 if any is violated."""
    from optpipe.verify import verify

    loaded = load_schedule(schedule, problem)
    verdict = verify(loaded)
    if as_json:
        document = {
            "ok": verdict.ok,
            "violations": [vars(violation) for violation in verdict.violations],
            "value_us": verdict.value_us,
            "makespan_us": verdict.makespan_us,
            "device_span_us": verdict.device_span_us,
            "host_peak_bytes": verdict.host_peak_bytes,
            "devices": [vars(facts) for facts in verdict.devices],
        }
        print_json(document)
        return 0 if verdict.ok else 1
    console = stdout()
    rows = table("device", "peak bytes", "under any timing", "budget", "span", "bubble")
    for d, (facts, device) in enumerate(zip(verdict.devices, loaded.problem.devices, strict=True)):
        worst_case = "deadlock" if facts.peak_bytes_any_timing is None else f"{facts.peak_bytes_any_timing:,}"
        budget = "none" if device.memory_bytes is None else f"{device.memory_bytes:,}"
        figures = f"{facts.peak_bytes:,}", worst_case, budget, us_text(facts.span_us), share_text(facts.bubble)
        rows.add_row(str(d), *figures)
    console.print(rows)
    console.print(f"makespan {us_text(verdict.makespan_us)}, device span {us_text(verdict.device_span_us)}")
    for violation in verdict.violations[:SHOWN_VIOLATIONS]:
        console.print(f"broken: {violation}")
    if len(verdict.violations) > SHOWN_VIOLATIONS:
        console.print(f"... and {len(verdict.violations) - SHOWN_VIOLATIONS} more (all with --json)")
    console.print(
        "valid: every rule and every figure holds" if verdict.ok else f"INVALID: {len(verdict.violations)} broken"
    )
    return 0 if verdict.ok else 1


def plot(
    schedule: ScheduleFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Output file: .png, .svg, .pdf or .html.")],
    problem: ProblemOfCsv = None,
    width: PrintWidth = None,
    as_json: AsJson = False,
) -> int:
    """Draw a schedule: a Gantt chart with each device's memory and its budget."""
    from optpipe.plot import draw_schedule

    check_picture(output)
    draw_schedule(load_schedule(schedule, problem), output, width)
    return answer({"output": str(output)}, f"wrote {output}", as_json)
