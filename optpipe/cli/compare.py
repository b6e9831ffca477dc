"""`optpipe compare`: runs every method on one problem and shows the results side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.console import (
    AsJson,
    check_picture,
    compile_once,
    ctrl_c_cancels,
    doing,
    names_in,
    print_json,
    stderr,
    stdout,
    table,
)
from optpipe.cli.documents import ProblemOfCsv, load_schedule_or
from optpipe.cli.solve import TimeLimit, free_memory_bytes
from optpipe.errors import InfeasibleError, MethodError, NoSolutionError
from optpipe.units import share_text, us_text

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule
    from solver.limits import Limits


@dataclass(frozen=True)
class Row:
    """Outcome of one method: a schedule, or why there is none; both if a search died after finding one."""

    method: str
    schedule: Schedule | None
    why_not: str
    seconds: float


def command(
    document: Annotated[
        Path,
        typer.Argument(
            help="A problem (optpipe.problem/1); or a schedule (optpipe.schedule/1) or a schedule CSV of torch, which "
            "then is compared too.",
            metavar="PROBLEM.json",
        ),
    ],
    problem: ProblemOfCsv = None,
    time_limit: TimeLimit = 30.0,
    methods: Annotated[
        str | None, typer.Option(help="Names, separated by commas; default: all.", metavar="a,b")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the schedules at one time scale (png, svg, html).")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run every method on a problem and show value, bubble, peak and seconds, or why a method has no schedule.

    Each search has the whole time limit. Where stages have activation modes, what uniform choices of them give is shown
    too. Ctrl-C stops the running search, keeps its best schedule so far, and shows the results up to then.
    """
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule
    from solver.limits import Cancel, Limits
    from solver.methods import METHODS, method_named

    names = [name for name in METHODS if name != "auto"] if methods is None else names_in(methods)
    for name in names:
        method_named(name, "--methods")
    if plot:
        check_picture(plot)
    given = load_schedule_or(Problem, document, problem)
    loaded = given.problem if isinstance(given, Schedule) else given
    compile_once()
    rows = [_given(given)] if isinstance(given, Schedule) else []
    cancel = Cancel()
    with ctrl_c_cancels(cancel):
        for name in names:
            with doing(f"{name}, up to {time_limit:g} s"):
                rows.append(_run(loaded, name, Limits(time_limit, cancel=cancel)))
            if cancel.requested:
                break
        if loaded.has_modes and not methods and not cancel.requested:
            with doing("uniform choices of modes"):
                rows += _uniform(loaded)
    if as_json:
        print_json([_document(row) for row in rows])
    else:
        _print(rows)
    if plot:
        _draw(rows, plot)
    return 130 if cancel.requested else 0


def _given(schedule: Schedule) -> Row:
    """The schedule that was handed in, or the first rule that it breaks."""
    from optpipe.verify import verify
    from solver.bounds import lower_bound_us
    from solver.build import build_schedule

    problem, verdict = schedule.problem, verify(schedule)
    if not verdict.ok:
        return Row("given", None, f"{len(verdict.violations)} broken, the first: {verdict.violations[0]}", 0.0)
    bound_us = lower_bound_us(problem)
    return Row("given", build_schedule(problem, schedule.orders, bound_us, schedule.method, 0.0), "", 0.0)


def _run(problem: Problem, name: str, limits: Limits) -> Row:
    """Make a published schedule in this process; run a search in a child, whose limits hold even if it hangs."""
    from solver.methods import METHODS
    from solver.process import SolverDiedError, refuse_beyond_verification, solve_in_child
    from solver.solve import solve

    schedule: Schedule | None = None
    why_not = ""
    try:
        if METHODS[name].kind == "published":
            refuse_beyond_verification(problem, limits.time_limit_s)
            schedule = solve(problem, name, limits)
        else:
            schedule = solve_in_child(problem, name, limits, free_memory_bytes()).schedule_or_error()
    except (MethodError, InfeasibleError, NoSolutionError) as error:
        why_not = str(error)
    except SolverDiedError as error:
        schedule, why_not = error.best, str(error)
    return Row(name, schedule, why_not, limits.seconds)


def _uniform(problem: Problem) -> list[Row]:
    """Best published schedule with every microbatch in the same kind of mode, and with one mode for each stage."""
    from solver.bounds import lower_bound_us
    from solver.build import build_schedule
    from solver.warm_starts import best_of_uniform_choices

    began = time.perf_counter()
    best = best_of_uniform_choices(problem)
    seconds = time.perf_counter() - began
    bound_us = lower_bound_us(problem)
    return [
        Row(kind, build_schedule(problem, solution.orders, bound_us, solution.method, seconds), "", seconds)
        for kind, solution in best.items()
        if solution.orders is not None
    ]


def _draw(rows: Sequence[Row], path: Path) -> None:
    from optpipe.plot import draw_comparison

    labelled = [(row.method, row.schedule) for row in rows if row.schedule]
    if labelled:
        draw_comparison(labelled, path)
    else:
        stderr().print(f"{path} is not drawn: no schedule was found.")


def _document(row: Row) -> dict[str, Any]:
    document: dict[str, Any] = {"method": row.method, "seconds": round(row.seconds, 3)}
    if row.schedule is None:
        return document | {"why_not": row.why_not}
    return row.schedule.figures() | document | ({"why_not": row.why_not} if row.why_not else {})


def _print(rows: Sequence[Row]) -> None:
    result = table("method", "value", "bound", "bubble", "peak bytes", "seconds", "", wraps=True)
    for row in sorted(rows, key=lambda row: row.schedule.value_us if row.schedule else float("inf")):
        figures, comment = ["-"] * 4, row.why_not
        if (best := row.schedule) is not None:
            figures = [us_text(best.value_us), us_text(best.bound_us), share_text(best.bubble)]
            figures.append(f"{best.largest_peak_bytes:,}")
            comment = row.why_not or best.status
        result.add_row(row.method, *figures, f"{row.seconds:.2f}", comment)
    stdout().print(result)
