"""`optpipe solve`: a problem in, a verified schedule out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.output import (
    AsJson,
    check_writable,
    print_json,
    share_text,
    stderr,
    stdout,
    time_text,
    write_whole,
)
from optpipe.errors import NoSolutionError

if TYPE_CHECKING:
    from optpipe.schedule import Schedule
    from solver.portfolio import Progress

TimeLimit = Annotated[float, typer.Option("--time-limit", min=0.01, max=1e6, help="Seconds to search.")]


def command(
    problem: Annotated[Path, typer.Argument(help="A problem file (optpipe.problem/1).", metavar="PROBLEM.json")],
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", help="Write the schedule here; - for stdout.", metavar="SCHEDULE.json"),
    ] = None,
    method: Annotated[str, typer.Option(help="One of `optpipe methods`.")] = "auto",
    time_limit: TimeLimit = 30.0,
    gap: Annotated[float, typer.Option(min=0.0, max=1.0, help="Stop at (value - bound) / value of this.")] = 0.0,
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads; default: all cores.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the search.")] = 0,
    as_json: AsJson = False,
) -> int:
    """Find a schedule: the order of every op on every device, and what is offloaded when, within every budget.

    Progress goes to stderr, a summary to stdout. Ctrl-C stops the search and keeps the best schedule so far.
    """
    from optpipe.problem import Problem
    from optpipe.schedule_text import schedule_text
    from solver.limits import Limits, available_cores
    from solver.methods import method_named
    from solver.portfolio import solve_until_interrupted

    method_named(method)
    to_stdout = output == "-"
    if output and not to_stdout:
        check_writable(Path(output))
    loaded = Problem.load(problem)
    limits = Limits(time_limit, gap, workers or available_cores(), seed)
    try:
        with stderr().status(f"solving {loaded.name or problem.name} with {method} for up to {time_limit:g} s"):
            schedule = solve_until_interrupted(loaded, method, limits, print_progress)
    except NoSolutionError:
        if limits.cancel.requested:
            raise KeyboardInterrupt from None  # there was no time to find anything: it is the interruption that counts
        raise
    if output and not to_stdout:
        write_whole(Path(output), schedule_text(schedule))
    if to_stdout:
        print(schedule_text(schedule), end="")
    elif as_json:
        print_json(summary(schedule) | {"output": output, "interrupted": limits.cancel.requested})
    else:
        _print_summary(schedule, output)
    return 130 if limits.cancel.requested else 0


def print_progress(progress: Progress) -> None:
    """One line on stderr for each better value or bound."""
    stderr().print(
        f"{progress.seconds:8.2f} s  {time_text(progress.value_us):>16}  bound {time_text(progress.bound_us):>16}  "
        f"gap {share_text(progress.gap):>8}  {progress.method}",
        markup=False,
    )


def summary(schedule: Schedule) -> dict[str, Any]:
    """What a person or a script wants to know of a schedule at once."""
    return {
        "name": schedule.problem.name,
        "method": schedule.method,
        "status": schedule.status,
        "objective": schedule.objective,
        "value_us": schedule.value_us,
        "bound_us": schedule.bound_us,
        "gap": schedule.gap,
        "bubble": schedule.bubble,
        "solve_seconds": schedule.solve_seconds,
        "peak_bytes": [device.peak_bytes for device in schedule.devices],
        "peak_bytes_any_timing": [device.peak_bytes_any_timing for device in schedule.devices],
        "memory_bytes": [device.memory_bytes for device in schedule.problem.devices],
    }


def _print_summary(schedule: Schedule, output: str | None) -> None:
    console = stdout()
    proof = "optimal" if schedule.status == "optimal" else f"at most {share_text(schedule.gap)} above the optimum"
    lines = [
        f"{schedule.problem.name or 'problem'}: {schedule.objective} {time_text(schedule.value_us)}, {proof} "
        f"(bound {time_text(schedule.bound_us)})",
        f"method {schedule.method}, {schedule.solve_seconds:.2f} s; bubble {share_text(schedule.bubble)}; "
        f"{_offloads_text(schedule)}",
        _memory_text(schedule),
    ]
    if output:
        lines.append(f"wrote {output}")
    for line in lines:
        console.print(line, markup=False)


def _offloads_text(schedule: Schedule) -> str:
    moved = sum(len(device.offload) for device in schedule.devices)
    return f"{moved} activations offloaded" if moved else "nothing offloaded"


def _memory_text(schedule: Schedule) -> str:
    """The device whose any-timing peak is nearest to its budget."""
    limited = [
        (device.peak_bytes_any_timing, entry.memory_bytes, d)
        for d, (device, entry) in enumerate(zip(schedule.devices, schedule.problem.devices, strict=True))
        if entry.memory_bytes is not None
    ]
    if not limited:
        return f"peak {max(device.peak_bytes for device in schedule.devices):,} bytes; no budgets"
    peak, budget, d = max(limited, key=lambda entry: (entry[0] / entry[1] if entry[1] else 1.0, -entry[2]))
    return f"fullest device {d}: at most {peak:,} of {budget:,} bytes under any timing"
