"""`optpipe bench`: a suite of regression instances, solved and held against what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.bench_report import document, print_report, result_line
from optpipe.cli.compiling import compile_once
from optpipe.cli.names import names_in
from optpipe.cli.output import AsJson, check_writable, doing, print_json, stderr, write_whole
from optpipe.errors import InputError, Issue

if TYPE_CHECKING:
    from solver.bench.cases import Case
    from solver.bench.judge import Result
    from solver.bench.suite import Suite
    from solver.limits import Limits

DEFAULT_TIME_LIMIT_S = 30.0


@dataclass(frozen=True)
class Outcome:
    """The cases that were run, and whether the user stopped before the last."""

    results: Sequence[Result]
    interrupted: bool


def command(
    suite: Annotated[
        str,
        typer.Argument(
            help="A suite file (optpipe.suite/1), or a named suite: small, budgets, large, published.", metavar="SUITE"
        ),
    ] = "small",
    time_limit: Annotated[
        float | None,
        typer.Option(min=0.01, max=1e6, help=f"Seconds for each; default: the suite's, or {DEFAULT_TIME_LIMIT_S:g}."),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Run these on every instance, not the recorded method.", metavar="a,b")
    ] = None,
    only: Annotated[str, typer.Option(help="Only instances whose name matches; * and ? stand for anything.")] = "*",
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads; default: all cores.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the search.")] = 0,
    seconds_ratio: Annotated[
        float | None, typer.Option(min=1.0, help="Fail where a run takes this many times the recorded seconds.")
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="Write results that are better into the suite.")] = False,
    force: Annotated[bool, typer.Option("--force", help="With --record: write worse results too.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw value over time (png, svg, html).")] = None,
    as_json: AsJson = False,
) -> int:
    """Solve a suite of regression instances and compare value, bound and seconds with the recorded ones.

    Exit code 1 if a value is above the recorded one, a bound below it, or a proof lost. Progress goes to stderr.
    Ctrl-C stops and keeps what is done.
    """
    from solver.bench.cases import cases_of
    from solver.bench.suite import Suite
    from solver.limits import Limits, available_cores

    if force and not record:
        raise InputError([Issue("--force", "no_record", "is given without --record. Maybe add --record.")])
    path = _suite_path(suite)
    if record:
        _check_not_installed(path)
    loaded = Suite.load(path)
    names = names_in(methods) if methods else None
    cases = cases_of(path, loaded, names, only)
    _check_files(path if record else None, plot)
    seconds = time_limit or loaded.time_limit_s or DEFAULT_TIME_LIMIT_S

    def limits() -> Limits:
        return Limits(seconds, 0.0, workers or available_cores(), seed)

    compile_once()
    outcome = _run(cases, limits, seconds_ratio)
    recorded = _record(path, loaded, outcome.results, limits(), force) if record else None
    if plot:
        _draw(outcome.results, seconds, plot, f"{path.stem}: best value over time, {limits().workers} cores")
    if as_json:
        print_json(document(path, outcome.results, limits(), outcome.interrupted, recorded))
    else:
        print_report(outcome.results, recorded)
    if outcome.interrupted:
        return 130
    return 1 if any(result.verdict.change == "regression" for result in outcome.results) else 0


def _suite_path(suite: str) -> Path:
    """The file itself, or the suite of that name. Raises InputError where there is none of that name."""
    if suite.endswith(".json"):
        return Path(suite)
    from solver.bench.suite import suites_folder

    folder = suites_folder()
    path = folder / f"{suite}.json"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in folder.glob("*.json"))) or "none"
        detail = f"is {suite!r}, but the named suites are: {names}. Maybe give the path of a file that ends in .json."
        raise InputError([Issue("suite", "unknown_suite", detail)])
    return path


def _check_not_installed(path: Path) -> None:
    """Refuse to record into the installed suites: the next installation would overwrite the records."""
    from solver.bench.suite import INSTALLED

    if path.resolve().is_relative_to(INSTALLED):
        detail = (
            f"would change the installed suite {path}. Maybe copy the folder {INSTALLED} and give the path of the "
            "suite in the copy."
        )
        raise InputError([Issue("--record", "installed_suite", detail)])


def _check_files(suite: Path | None, plot: Path | None) -> None:
    """Refuse now what could not be written after all the runs."""
    if suite:
        check_writable(suite)
    if plot:
        from optpipe.plot.output import format_of

        format_of(plot)
        check_writable(plot)


def _run(cases: Sequence[Case], limits: Callable[[], Limits], seconds_ratio: float | None) -> Outcome:
    """Run the cases one after another; Ctrl-C ends the one that runs, and the rest is left out."""
    from solver.bench.judge import Result, judge
    from solver.bench.measure import measure

    results: list[Result] = []
    try:
        for place, case in enumerate(cases, start=1):
            head, these = f"{place}/{len(cases)}", limits()
            with doing(f"{head} {case.instance} with {case.method}, up to {these.time_limit_s:g} s"):
                measured = measure(case.problem, case.method, these)
            result = Result(case, measured, judge(case, measured, these, seconds_ratio))
            results.append(result)
            stderr().print(f"{head:>7}  {result_line(result)}")
            if measured.interrupted:
                return Outcome(results, True)
    except KeyboardInterrupt:
        return Outcome(results, True)
    return Outcome(results, False)


def _record(path: Path, suite: Suite, results: Sequence[Result], limits: Limits, force: bool) -> int:
    """Write the new records, and return how many there are."""
    from solver.bench.record import with_records

    changed, count = with_records(suite, results, limits, force)
    if count:
        write_whole(path, changed.to_text())
    return count


def _draw(results: Sequence[Result], time_limit_s: float, path: Path, title: str) -> None:
    from optpipe.cli.bench_curves import curves_of
    from optpipe.plot.value_over_time import draw_value_over_time

    curves = curves_of([(result.case, result.measured) for result in results])
    if curves:
        draw_value_over_time(curves, time_limit_s, path, title)
    else:
        stderr().print(f"{path} is not drawn: no schedule was found.")
