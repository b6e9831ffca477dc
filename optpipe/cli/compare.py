"""`optpipe compare`: methods and schedules of files side by side, a table for each problem."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.console import (
    AsJson,
    PrintWidth,
    check_picture,
    compile_once,
    ctrl_c_cancels,
    doing_long,
    names_in,
    print_json,
    stderr,
    stdout,
    table,
)
from optpipe.cli.documents import ProblemOfCsv, is_torch_csv, load_schedule_or
from optpipe.cli.solve import SAME, TimeLimit, free_memory_bytes
from optpipe.errors import InfeasibleError, InputError, Issue, MethodError, NoSolutionError
from optpipe.units import bytes_text, percent_text, share_text, time_text, time_unit

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule
    from solver.limits import Cancel, Limits


@dataclass(frozen=True)
class Row:
    """Outcome of a method or a file: a schedule, or why there is none; both if a search died after finding one.

    `is_rule`: a published schedule or one of a file, which a trainer may run today; otherwise a search's.
    """

    method: str
    schedule: Schedule | None
    why_not: str
    seconds: float
    is_rule: bool = True


@dataclass(frozen=True)
class Table:
    """Results on one problem, which the file `path` states."""

    path: Path
    problem: Problem
    rows: list[Row] = field(default_factory=list)

    @property
    def schedules(self) -> list[tuple[str, Schedule]]:
        """The schedules that there are, with their labels, best first."""
        found = [(row.method, row.schedule) for row in self.rows if row.schedule]
        return sorted(found, key=lambda one: one[1].value_us)

    @property
    def bound_us(self) -> float:
        """The best lower bound that any of the rows proved; rounding puts it above no value."""
        schedules = [schedule for _, schedule in self.schedules]
        return min(max(one.bound_us for one in schedules), schedules[0].value_us) if schedules else 0.0


def command(
    documents: Annotated[
        list[Path],
        typer.Argument(
            help="Problems (optpipe.problem/1), each with a table of its own; and schedules (optpipe.schedule/1) or "
            "schedule CSVs of torch, which stand in the table of their problem.",
            metavar="FILE...",
        ),
    ],
    problem: ProblemOfCsv = None,
    time_limit: TimeLimit = 30.0,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Names, separated by commas; also a schedule of yours, FILE.py:FUNCTION. Default: all.", metavar="a,b"
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the schedules at one time scale (png, svg, pdf, html).")
    ] = None,
    width: PrintWidth = None,
    as_json: AsJson = False,
) -> int:
    """Run methods on problems and show value, gap, bubble, peak and seconds, or why a method has no schedule.

    A gap is the share by which a schedule might at most be shorter: its distance to the best bound that was proved.
    Each search has the whole time limit. Where stages have activation modes, what uniform choices of them give is shown
    too. Ctrl-C stops the running search, keeps its best schedule so far, and shows the results up to then.
    """
    from solver.limits import Cancel
    from solver.methods import METHODS, method_named, register_file

    asked = [name for name in METHODS if name != "auto"] if methods is None else names_in(methods)
    names = [
        (register_file(name, "--methods") if ":" in name else method_named(name, "--methods")).name for name in asked
    ]
    if plot:
        check_picture(plot)
    with doing_long("reading files"):
        loaded = _load(documents, problem)
    compile_once()  # before schedules of files are timed
    with doing_long("timing schedules of files"):
        tables = _tables(loaded)
    if plot and len(tables) > 1:
        detail = f"draws schedules of one problem, but {len(tables)} are given. Maybe compare one at a time."
        raise InputError([Issue("--plot", "several_problems", detail)])
    cancel = Cancel()
    with ctrl_c_cancels(cancel):
        for one in tables:
            _fill(one, names, time_limit, cancel, with_uniform=methods is None)
    if as_json:
        print_json([_document(one, row) for one in tables for row in one.rows])
    else:
        for k, one in enumerate(tables):
            if k:
                stdout().print()
            _print(one)
    if plot:
        _draw(tables[0], plot, width)
    return 130 if cancel.requested else 0


def _load(paths: Sequence[Path], problem: Path | None) -> dict[Path, Problem | Schedule]:
    """The documents in files, problems first, then schedules, in the order of the files."""
    from optpipe.problem import Problem

    csvs = [path for path in paths if is_torch_csv(path)]
    if problem is not None and not csvs:
        detail = f"gives costs to schedule CSVs of torch, but {paths[0]} is none. Maybe leave it out."
        raise InputError([Issue("--problem", "meaningless", detail)])
    loaded = {path: load_schedule_or(Problem, path, None) for path in paths if path not in csvs}
    problems = [path for path, one in loaded.items() if isinstance(one, Problem)]
    if csvs and problem is None and len(problems) > 1:
        detail = f"is needed for the costs of {csvs[0]}: {len(problems)} problems are given. Maybe {problems[0]}."
        raise InputError([Issue("--problem", "missing", detail)])
    costs = problem or next(iter(problems), None)
    loaded |= {path: load_schedule_or(Problem, path, costs) for path in csvs}
    return {path: loaded[path] for path in sorted(paths, key=lambda path: path not in problems)}


def _tables(loaded: Mapping[Path, Problem | Schedule]) -> list[Table]:
    """A table for each problem that is given or that a schedule answers, with rows of the schedules."""
    from optpipe.schedule import Schedule

    tables: list[Table] = []
    for path, one in loaded.items():
        stated = one.problem if isinstance(one, Schedule) else one
        own = next((table for table in tables if table.problem == stated), None)
        if own is None:
            own = Table(path, stated)
            tables.append(own)
        if isinstance(one, Schedule):
            own.rows.append(_given(path.name, one))
    return tables


def _given(name: str, schedule: Schedule) -> Row:
    """The schedule that was handed in, or the first rule that it breaks."""
    from optpipe.verify import verify
    from solver.bounds import lower_bound_us
    from solver.build import build_schedule

    problem, verdict = schedule.problem, verify(schedule)
    if not verdict.ok:
        return Row(name, None, f"{len(verdict.violations)} broken, the first: {verdict.violations[0]}", 0.0)
    bound_us = lower_bound_us(problem)  # the file's own may be edited
    return Row(name, build_schedule(problem, schedule.orders, bound_us, schedule.method, 0.0), "", 0.0)


def _fill(one: Table, names: Iterable[str], time_limit: float, cancel: Cancel, with_uniform: bool) -> None:
    from solver.limits import Limits

    for name in names:
        if cancel.requested:
            return
        with doing_long(f"{name}, up to {time_limit:g} s"):
            one.rows.append(_run(one.problem, name, Limits(time_limit, cancel=cancel)))
    if one.problem.has_modes and with_uniform and not cancel.requested:
        with doing_long("uniform choices of modes"):
            one.rows.extend(_uniform(one.problem))


def _run(problem: Problem, name: str, limits: Limits) -> Row:
    """Make a published schedule in this process; run a search in a child, whose limits hold even if it hangs."""
    from solver.methods import method_named
    from solver.process import SolverDiedError, refuse_beyond_verification, solve_in_child
    from solver.solve import solve

    schedule: Schedule | None = None
    why_not = ""
    is_rule = method_named(name).orders is not None
    try:
        if is_rule:
            refuse_beyond_verification(problem, limits.time_limit_s)
            schedule = solve(problem, name, limits)
        else:
            schedule = solve_in_child(problem, name, limits, free_memory_bytes()).schedule_or_error()
    except (MethodError, InfeasibleError, NoSolutionError) as error:
        why_not = str(error)
    except SolverDiedError as error:
        schedule, why_not = error.best, str(error)
    return Row(name, schedule, why_not, limits.seconds, is_rule)


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


def _draw(one: Table, path: Path, width_inches: float | None) -> None:
    from optpipe.plot import draw_comparison

    if labelled := [(row.method, row.schedule) for row in one.rows if row.schedule]:
        draw_comparison(labelled, path, width_inches)
    else:
        stderr().print(f"{path} is not drawn: no schedule was found.")


def _document(one: Table, row: Row) -> dict[str, Any]:
    from optpipe.schedule import relative_gap

    document: dict[str, Any] = {"file": str(one.path), "method": row.method, "seconds": round(row.seconds, 3)}
    if row.why_not:
        document["why_not"] = row.why_not
    if row.schedule is None:
        return document
    gap = relative_gap(row.schedule.value_us, one.bound_us)
    return row.schedule.figures() | document | {"bound_us": one.bound_us, "gap": gap}


def _print(one: Table) -> None:
    """Print a table, the least step first, with the bound above it and a sentence below."""
    from optpipe.schedule import relative_gap

    least_us = min((schedule.value_us for _, schedule in one.schedules), default=one.bound_us)
    unit = time_unit(least_us)
    bound = f": no schedule is shorter than {time_text(one.bound_us, unit)}" if one.schedules else ""
    stdout().print(f"{one.problem.name or one.path}{bound}")
    objective = one.problem.objective.replace("_", " ")
    result = table("method", objective, "gap", "bubble", "peak", "left", "seconds", "", wraps=True)
    for row in sorted(one.rows, key=lambda row: row.schedule.value_us if row.schedule else float("inf")):
        figures, comment = ["-"] * 5, row.why_not
        if (best := row.schedule) is not None:
            gap = relative_gap(best.value_us, one.bound_us)
            figures = [time_text(best.value_us, unit), share_text(gap), share_text(best.bubble)]
            figures += [bytes_text(best.largest_peak_bytes), _least_left(best)]
            comment = row.why_not or ("optimal" if gap == 0 else "")
        result.add_row(row.method, *figures, f"{row.seconds:.2f}", comment)
    stdout().print(result)
    if sentence := _worth(one):
        stdout().print(sentence)


def _least_left(schedule: Schedule) -> str:
    """Rest of the budget on the device that has least left."""
    left = [
        budget.memory_bytes - device.peak_bytes_any_timing
        for device, budget in zip(schedule.devices, schedule.problem.devices, strict=True)
        if budget.memory_bytes is not None
    ]
    return bytes_text(min(left)) if left else "no limit"


def _worth(one: Table) -> str:
    """Sentence on whether an order that was searched for, or could be, pays against the best rule that fits."""
    rules, searched = (
        sorted((row.schedule.value_us, row.method) for row in one.rows if row.schedule and row.is_rule == is_rule)
        for is_rule in (True, False)
    )
    if not rules:
        return f"no published schedule of these fits; {searched[0][1]} does" if searched else ""
    rule_us, rule = rules[0]
    best_us, best = searched[0] if searched else (rule_us, "")
    saved, most_saved = (1 - shorter_us / rule_us if rule_us else 0.0 for shorter_us in (best_us, one.bound_us))
    if saved >= SAME:
        return f"{best} saves {percent_text(saved)} of the step of {rule}, the shortest other schedule that fits"
    if most_saved < SAME:
        near = f"is within {percent_text(most_saved)} of the shortest" if most_saved > 0 else "is optimal"
        return f"{rule} {near}: change nothing"
    most = f"no schedule can save more than {percent_text(most_saved)} of the step of {rule}"
    if not best:
        return most
    return f"{best} saves {f'less than {percent_text(SAME)}' if saved > 0 else 'nothing'}; {most}"
