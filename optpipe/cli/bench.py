"""`optpipe bench`: regression suites solved and held against their record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.console import (
    AsJson,
    compile_once,
    doing,
    names_in,
    print_json,
    stderr,
    stdout,
    table,
)
from optpipe.errors import InputError, Issue
from optpipe.files import check_writable, write_atomically
from optpipe.units import number_text, share_text, us_text

if TYPE_CHECKING:
    from solver.limits import Limits
    from solver.regression.judge import Result
    from solver.regression.run import Case, Suite


DEFAULT_TIME_LIMIT_S = 30.0


@dataclass(frozen=True)
class SuiteRun:
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
    from solver.limits import Limits, available_cores
    from solver.regression.run import Suite, expand_cases

    if force and not record:
        raise InputError([Issue("--force", "no_record", "is given without --record. Maybe add --record.")])
    path = _suite_path(suite)
    if record:
        _check_not_installed(path)
    loaded = Suite.load(path)
    names = names_in(methods) if methods else None
    cases = expand_cases(path, loaded, names, only)
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
    from solver.regression.run import suites_folder

    folder = suites_folder()
    path = folder / f"{suite}.json"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in folder.glob("*.json"))) or "none"
        detail = f"is {suite!r}, but the named suites are: {names}. Maybe give the path of a file that ends in .json."
        raise InputError([Issue("suite", "unknown_suite", detail)])
    return path


def _check_not_installed(path: Path) -> None:
    """Refuse to record into the installed suites: the next installation would overwrite the records."""
    from solver.regression.run import INSTALLED

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
        from optpipe.plot.figure import format_of

        format_of(plot)
        check_writable(plot)


def _run(cases: Sequence[Case], limits: Callable[[], Limits], seconds_ratio: float | None) -> SuiteRun:
    """Run the cases one after another; Ctrl-C ends the one that runs, and the rest is left out."""
    from solver.regression.judge import Result, judge
    from solver.regression.run import measure

    results: list[Result] = []
    try:
        for index, case in enumerate(cases, start=1):
            head, these = f"{index}/{len(cases)}", limits()
            with doing(f"{head} {case.instance} with {case.method}, up to {these.time_limit_s:g} s"):
                measured = measure(case.problem, case.method, these)
            result = Result(case, measured, judge(case, measured, these, seconds_ratio))
            results.append(result)
            stderr().print(f"{head:>7}  {result_line(result)}")
            if measured.interrupted:
                return SuiteRun(results, True)
    except KeyboardInterrupt:
        return SuiteRun(results, True)
    return SuiteRun(results, False)


def _record(path: Path, suite: Suite, results: Sequence[Result], limits: Limits, force: bool) -> int:
    """Write the new records, and return how many there are."""
    from solver.regression.judge import with_records

    changed, count = with_records(suite, results, limits, force)
    if count:
        write_atomically(path, changed.to_text())
    return count


def _draw(results: Sequence[Result], time_limit_s: float, path: Path, title: str) -> None:
    from optpipe.cli.bench_curves import build_curves
    from optpipe.plot.value_over_time import draw_value_over_time

    curves = build_curves([(result.case, result.measured) for result in results])
    if curves:
        draw_value_over_time(curves, time_limit_s, path, title)
    else:
        stderr().print(f"{path} is not drawn: no schedule was found.")


COLUMNS = (
    "instance", "method", "value us", "recorded us", "change", "bound us", "gap", "bubble", "best public us", "seconds"
)  # fmt: skip


def result_line(result: Result) -> str:
    """One run on one line, as it ends."""
    figures, case = result.measured.figures, result.case
    head = f"{case.instance}  {case.method}"
    if figures is None:
        return f"{head}  {result.verdict.change}: {result.measured.why_not}"
    text = f"{us_text(figures.value_us, 1)}, gap {share_text(figures.gap)}, {figures.seconds:.2f} s"
    return f"{head}  {text}  {_verdict_text(result)}"


def print_report(results: Sequence[Result], recorded: int | None) -> None:
    """The table, what makes regressions of them, and the summary."""
    rows = table(*COLUMNS, "")
    for column in (rows.columns[1], rows.columns[-1]):
        column.justify = "left"
    for result in results:
        rows.add_row(*_cells(result))
    console = stdout()
    console.print(rows)
    for result in results:
        for finding in result.verdict.findings:
            console.print(f"regression: {result.case.instance} with {result.case.method}: {finding}")
    for line in _summary(results, recorded):
        console.print(line)


def _cells(result: Result) -> list[str]:
    case, figures, recorded = result.case, result.measured.figures, result.case.recorded
    values = [number_text(recorded.value_us, 1) if recorded else "-", "-"]
    public = number_text(case.public.value_us, 1) if case.public else "-"
    seconds = f"{figures.seconds if figures else result.measured.seconds:.2f}"
    if figures is None:
        return [case.instance, case.method, "-", *values, "-", "-", "-", public, seconds, _verdict_text(result)]
    change = _change(result)
    if change is not None:
        values[1] = "0" if change == 0 else f"{100 * change:+.2f} %"
    value, bound = number_text(figures.value_us, 1), number_text(figures.bound_us, 1)
    found = [value, *values, bound, share_text(figures.gap), share_text(figures.bubble), public, seconds]
    return [case.instance, case.method, *found, _verdict_text(result)]


def _change(result: Result) -> float | None:
    """How far the value is above the recorded one, as a share of it."""
    figures, recorded = result.measured.figures, result.case.recorded
    if figures is None or recorded is None or not recorded.value_us:
        return None
    return figures.value_us / recorded.value_us - 1


def _verdict_text(result: Result) -> str:
    change = result.verdict.change
    text = "REGRESSION" if change == "regression" else change
    proved = result.measured.figures is not None and result.measured.figures.optimal
    return text + (", proved" if proved else "") + (", slow" if result.verdict.slow else "")


def _summary(results: Sequence[Result], recorded: int | None) -> list[str]:
    """How many of each verdict, how ours compare with the public ones, and what was written."""
    changes = [result.verdict.change for result in results]
    counts = ", ".join(f"{changes.count(change)} {change}" for change in dict.fromkeys(changes))
    lines = [f"{len(results)} runs: {counts}" if results else "nothing was run"]
    for method in dict.fromkeys(result.case.method for result in results):
        lines += _against_public([result for result in results if result.case.method == method], method)
    if recorded is not None:
        lines.append(f"{recorded} results recorded")
    return lines


def _against_public(results: Sequence[Result], method: str) -> list[str]:
    """Values and mean bubbles of a method against the best public ones, and again where stages may offload."""
    known = [
        (result.case, figures, public)
        for result in results
        if (figures := result.measured.figures) and (public := result.case.public)
    ]
    offloading = [entry for entry in known if any(stage.offload for stage in entry[0].problem.stages)]
    lines = []
    for group, where in ((known, ""), (offloading, " that may offload")):
        if group:
            above = sum(figures.value_us > public.value_us for _, figures, public in group)
            ours = mean(figures.bubble for _, figures, _ in group)
            theirs = mean(public.bubble(figures) for _, figures, public in group)
            lines.append(
                f"{method}: above the best public value on {above} of {len(group)} instances{where}; "
                f"mean bubble {share_text(ours)} against {share_text(theirs)}"
            )
    return lines


def document(
    path: Path, results: Sequence[Result], limits: Limits, interrupted: bool, recorded: int | None
) -> dict[str, Any]:
    """Everything as one JSON document; a curve is a list of [seconds, value_us, bound_us, method]."""
    from importlib.metadata import version

    return {
        "suite": str(path),
        "time_limit_s": limits.time_limit_s,
        "workers": limits.workers,
        "seed": limits.seed,
        "version": version("optpipe"),
        "interrupted": interrupted,
        "recorded": recorded,
        "regressions": sum(result.verdict.change == "regression" for result in results),
        "results": [_result_document(result) for result in results],
    }


def _result_document(result: Result) -> dict[str, Any]:
    case, measured, figures = result.case, result.measured, result.measured.figures
    entry: dict[str, Any] = {
        "instance": case.instance,
        "method": case.method,
        "verdict": result.verdict.change,
        "findings": list(result.verdict.findings),
        "slow": result.verdict.slow,
        "seconds": round(measured.seconds, 3),
        "recorded": case.recorded.to_data() if case.recorded else None,
        "public": vars(case.public) if case.public else None,
    }
    if figures is None:
        return entry | {"why_not": measured.why_not}
    values = {key: getattr(figures, key) for key in ("value_us", "bound_us", "gap", "bubble")}
    values["status"] = "optimal" if figures.optimal else "feasible"
    return entry | values | {"change": _change(result), "curve": [list(point) for point in measured.curve]}
