"""`optpipe verify` and `optpipe plot`: checks a schedule from its document alone, and draws it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optpipe.cli.console import AsJson, PrintWidth, answer, check_picture, doing_long, print_json, stdout, table
from optpipe.cli.documents import ProblemOfCsv, load_schedule
from optpipe.units import bytes_text, share_text, time_text, time_unit

ScheduleFile = Annotated[
    Path,
    typer.Argument(help="A schedule (optpipe.schedule/1), or a schedule CSV of torch.", metavar="SCHEDULE.json"),
]

SHOWN_VIOLATIONS = 20


def command(schedule: ScheduleFile, problem: ProblemOfCsv = None, as_json: AsJson = False) -> int:
    """Check every rule, budget and figure of a schedule. Exit code 1 if any is violated."""
    from optpipe.verify import verify

    with doing_long(f"verifying {schedule.name}"):
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
    columns = ("peak", "under any timing", "budget", "left", "busy", "idle before", "within", "after")
    rows, unit = table("device", *columns), time_unit(verdict.makespan_us)
    for d, (facts, device) in enumerate(zip(verdict.devices, loaded.problem.devices, strict=True)):
        worst, budget = facts.peak_bytes_any_timing, device.memory_bytes
        sizes = [
            bytes_text(facts.peak_bytes),
            "deadlock" if worst is None else bytes_text(worst),
            "none" if budget is None else bytes_text(budget),
            "-" if budget is None or worst is None else bytes_text(budget - worst),
        ]
        times = [time_text(time_us, unit) for time_us in (facts.busy_us, *loaded.idle_us(d))]
        rows.add_row(str(d), *sizes, *times)
    console.print(rows)
    console.print(
        f"makespan {time_text(verdict.makespan_us)}, device span {time_text(verdict.device_span_us)}, "
        f"bubble {share_text(max(verdict.devices, key=lambda facts: facts.busy_us).bubble)}"
    )
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
    with doing_long(f"drawing {output.name}"):
        draw_schedule(load_schedule(schedule, problem), output, width)
    return answer({"output": str(output)}, f"wrote {output}", as_json)
