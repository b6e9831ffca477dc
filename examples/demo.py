"""Main workflow: a measured profile in, a proved schedule out, a model trained with it. Run by `make demo`.

Solves two problems, draws them, trains a small GPT on the second schedule on four virtual devices in this process
with a check against the plain step, and prints one table of it all.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from optpipe.cli.console import stdout, table
from optpipe.cli.solve import print_event
from optpipe.cli.train_report import print_result, print_step
from optpipe.errors import MethodError
from optpipe.plot import draw_comparison, draw_schedule
from optpipe.problem import Problem
from optpipe.schedule import Schedule, schedule_text
from optpipe.train import TrainingConfig, train
from optpipe.units import share_text, us_text
from solver.limits import Limits
from solver.process import solve_in_child
from solver.solve import solve

PROBLEMS = Path(__file__).parent / "problems"
MEASURED = PROBLEMS / "zb-1.5b-p8-m24-mem1.json"
WITH_OFFLOAD = PROBLEMS / "offload-p4-m8.json"
PUBLISHED = ("1f1b", "zb-h1", "zb-auto", "ada-offload")

console = stdout()


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where schedules and pictures go")
    parser.add_argument("--time-limit", type=float, default=40.0, help="seconds for each search")
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    measured = solve_and_draw(MEASURED, options.out, options.time_limit)
    offloaded = solve_and_draw(WITH_OFFLOAD, options.out, options.time_limit)
    console.print("\ntraining a small GPT on the second schedule: 4 virtual devices, one process", style="bold")
    schedule = offloaded[-1].schedule
    assert schedule is not None
    result = train(TrainingConfig(schedule, steps=options.steps, check=True), lambda step: print_step(step, every=5))
    console.print("\nwhat came of it", style="bold")
    console.print(results_table([*measured, *offloaded]))
    print_result(result)
    console.print(f"\nschedules and pictures are in {options.out}/")


class Row(NamedTuple):
    """Result of a method on a problem: its schedule, or why it has none."""

    problem: Problem
    method: str
    schedule: Schedule | None
    why_not: str = ""


def solve_and_draw(path: Path, out: Path, time_limit_s: float) -> list[Row]:
    """Compare published schedules with the solver's, which comes last."""
    problem = Problem.load(path)
    console.print(
        f"\n{problem.name}: {len(problem.devices)} devices, {problem.microbatches} microbatches", style="bold"
    )
    rows = [published(problem, name) for name in PUBLISHED]
    best = solve_in_child(problem, "auto", Limits(time_limit_s), on_event=print_event).schedule_or_error()
    rows.append(Row(problem, f"optpipe ({best.method})", best))
    (out / f"{path.stem}.schedule.json").write_text(schedule_text(best))
    draw_schedule(best, out / f"{path.stem}.png")
    draw_comparison([(row.method, row.schedule) for row in rows if row.schedule], out / f"{path.stem}-compared.png")
    return rows


def published(problem: Problem, name: str) -> Row:
    """Make a published schedule; without one the result says why."""
    try:
        return Row(problem, name, solve(problem, name))
    except MethodError as error:
        return Row(problem, name, None, str(error).partition(" Maybe")[0])


def results_table(rows: list[Row]) -> Table:
    """Table of method, value, bound, bubble, peak and seconds of every schedule."""
    result = table("problem", "method", "value", "bound", "gap", "bubble", "peak / budget", "seconds", "status")
    for column in (1, -1):
        result.columns[column].justify = "left"
    result.columns[-1].no_wrap = False
    for problem, method, schedule, why_not in rows:
        if schedule is None:
            result.add_row(problem.name, method, *["-"] * 6, why_not)
            continue
        values = (us_text(schedule.value_us), us_text(schedule.bound_us), share_text(schedule.gap))
        more = (
            share_text(schedule.bubble),
            f"{fullest(schedule):.3f}",
            f"{schedule.solve_seconds:.2f}",
            schedule.status,
        )
        result.add_row(problem.name, method, *values, *more)
    return result


def fullest(schedule: Schedule) -> float:
    """Largest worst-case peak as a share of its budget."""
    pairs = zip(schedule.devices, schedule.problem.devices, strict=True)
    return max(device.peak_bytes_any_timing / entry.memory_bytes for device, entry in pairs if entry.memory_bytes)


if __name__ == "__main__":
    main()
