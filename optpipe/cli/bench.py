"""`optpipe bench`: solves regression suites and compares the results with the recorded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.console import (
    AsJson,
    check_picture,
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
from optpipe.units import share_text, time_text, times_text
from solver.components import NAMES, components_named

if TYPE_CHECKING:
    from optpipe.plot.value_over_time import InstanceCurves
    from solver.limits import Limits
    from solver.regression.judge import Result
    from solver.regression.run import Case, MeasuredRun


DEFAULT_TIME_LIMIT_S = 30.0

COLUMNS = (
    "instance", "method", "value", "recorded", "change", "bound", "gap", "bubble", "best public", "seconds"
)  # fmt: skip


def command(
    suite: Annotated[
        str,
        typer.Argument(
            help="A suite file (optpipe.suite/1), or a named suite: small, budgets, four-by-eight, recomputation, "
            "slices, large, published.",
            metavar="SUITE",
        ),
    ] = "small",
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1e6,
            help=f"Seconds per run; default: the suite's, else {DEFAULT_TIME_LIMIT_S:g}.",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Run these methods on every instance instead of the recorded one.", metavar="a,b"),
    ] = None,
    only: Annotated[str, typer.Option(help="Run only instances whose name matches this pattern (*, ?).")] = "*",
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads; default: all cores.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the search.")] = 0,
    deterministic_limit: Annotated[
        float | None,
        typer.Option(min=0.01, max=1e6, help="Limit the work of one thread instead of the time.", metavar="WORK"),
    ] = None,
    without: Annotated[
        str | None,
        typer.Option(help=f"Leave out these parts of auto; others get their work: {', '.join(NAMES)}.", metavar="a,b"),
    ] = None,
    seconds_ratio: Annotated[
        float | None,
        typer.Option(min=1.0, max=1e6, help="Fail if a run takes more than this many times the recorded seconds."),
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="Write better results to the suite file.")] = False,
    force: Annotated[bool, typer.Option("--force", help="With --record: write worse results too.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw value over time (png, svg, pdf, html).")] = None,
    as_json: AsJson = False,
) -> int:
    """Solve a suite of regression instances and compare value, bound and seconds with the recorded ones.

    Exit code 1 if a value is above the recorded one, a bound is below it, or a proof is lost. Progress goes to stderr.
    Ctrl-C stops the suite and reports the runs completed so far.
    """
    from solver.limits import Limits, available_cores
    from solver.regression.judge import with_records
    from solver.regression.run import INSTALLED, Suite, expand_cases

    if force and not record:
        raise InputError([Issue("--force", "no_record", "is given without --record. Maybe add --record.")])
    for option, given in (("--without", without), ("--deterministic-limit", deterministic_limit)):
        if record and given is not None:
            detail = "is given with --record, which keeps runs of all of auto by the clock. Maybe leave one out."
            raise InputError([Issue(option, "not_recorded", detail)])
    if deterministic_limit is not None and (time_limit or seconds_ratio or (workers or 1) > 1):
        detail = "counts the work of one thread, without a clock. Maybe leave out other limits and --workers."
        raise InputError([Issue("--deterministic-limit", "not_deterministic", detail)])
    left_out = components_named(names_in(without), "--without") if without is not None else frozenset()
    path = _suite_path(suite)
    if record and path.resolve().is_relative_to(INSTALLED):  # the next installation would overwrite the records
        detail = (
            f"would change the installed suite {path}. Maybe copy the folder {INSTALLED} and give the path of the "
            "suite in the copy."
        )
        raise InputError([Issue("--record", "installed_suite", detail)])
    loaded = Suite.load(path)
    cases = expand_cases(path, loaded, None if methods is None else names_in(methods), only)
    if record:
        check_writable(path)
    if plot:
        check_picture(plot)
    seconds = time_limit or loaded.time_limit_s or DEFAULT_TIME_LIMIT_S

    def limits() -> Limits:
        if deterministic_limit is not None:
            return Limits(float("inf"), 0.0, 1, seed, deterministic_limit=deterministic_limit, without=left_out)
        return Limits(seconds, 0.0, workers or available_cores(), seed, without=left_out)

    compile_once()
    results, interrupted = _run(cases, limits, seconds_ratio)
    recorded = None
    if record:
        changed, recorded = with_records(loaded, results, limits(), force)
        if recorded:
            write_atomically(path, changed.to_text())
    if plot:
        _draw(results, seconds, plot, f"{path.stem}: best value over time, {limits().workers} cores")
    if as_json:
        print_json(document(path, results, limits(), interrupted, recorded))
    else:
        _print_report(results, recorded)
    if interrupted:
        return 130
    return 1 if any(result.verdict.change == "regression" for result in results) else 0


def _suite_path(suite: str) -> Path:
    """Path of a suite given by file or by name. Raises InputError for an unknown name."""
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


def _run(
    cases: Sequence[Case], limits: Callable[[], Limits], seconds_ratio: float | None
) -> tuple[Sequence[Result], bool]:
    """Run the cases one after another; returns the results and whether Ctrl-C ended the suite early."""
    from solver.regression.judge import Result, judge
    from solver.regression.run import measure

    results: list[Result] = []
    try:
        for index, case in enumerate(cases, start=1):
            head, case_limits = f"{index}/{len(cases)}", limits()
            with doing(f"{head} {case.instance} with {case.method}, up to {case_limits.time_limit_s:g} s"):
                measured = measure(case.problem, case.method, case_limits)
            result = Result(case, measured, judge(case, measured, case_limits, seconds_ratio))
            results.append(result)
            figures, text = measured.figures, f"{result.verdict.change}: {measured.why_not}"
            if figures is not None:
                shown = f"{time_text(figures.value_us)}, gap {share_text(figures.gap)}, {figures.seconds:.2f} s"
                text = f"{shown}  {_verdict_text(result)}"
            stderr().print(f"{head:>7}  {case.instance}  {case.method}  {text}")
            if measured.interrupted:
                return results, True
    except KeyboardInterrupt:
        return results, True
    return results, False


def _draw(results: Sequence[Result], time_limit_s: float, path: Path, title: str) -> None:
    from optpipe.plot.value_over_time import draw_value_over_time

    curves = build_curves([(result.case, result.measured) for result in results])
    if curves:
        draw_value_over_time(curves, time_limit_s, path, title)
    else:
        stderr().print(f"{path} is not drawn: no schedule was found.")


def build_curves(runs: Sequence[tuple[Case, MeasuredRun]]) -> list[InstanceCurves]:
    """One chart per instance for which a run found a schedule, in the order of the runs.

    The chart's bound is the best one proved by any of its runs.
    """
    from optpipe.plot.value_over_time import Curve, InstanceCurves

    by_instance: dict[str, list[tuple[Case, MeasuredRun]]] = {}
    for case, measured in runs:
        if measured.figures is not None:
            by_instance.setdefault(case.instance, []).append((case, measured))
    charts = []
    for instance, instance_runs in by_instance.items():
        curves = [
            Curve(case.method, [(p.seconds, p.value_us) for p in measured.curve], figures.seconds, figures.optimal)
            for case, measured in instance_runs
            if (figures := measured.figures)
        ]
        case = instance_runs[0][0]
        bound_us = max(measured.curve[-1].bound_us for _, measured in instance_runs)
        public_us = case.public.value_us if case.public else None
        charts.append(InstanceCurves(instance, case.problem.objective, curves, bound_us, public_us))
    return charts


def _print_report(results: Sequence[Result], recorded: int | None) -> None:
    """Print the table of results, the findings behind each regression, and a summary."""
    rows = table(*COLUMNS, "", left=(0, 1, len(COLUMNS)))
    for result in results:
        rows.add_row(*_cells(result))
    console = stdout()
    console.print(rows)
    for result in results:
        for finding in result.verdict.findings:
            console.print(f"regression: {result.case.instance} with {result.case.method}: {finding}")
    changes = [result.verdict.change for result in results]
    counts = ", ".join(f"{changes.count(change)} {change}" for change in dict.fromkeys(changes))
    console.print(f"{len(results)} runs: {counts}" if results else "nothing was run")
    for method in dict.fromkeys(result.case.method for result in results):
        _print_against_public([result for result in results if result.case.method == method], method)
    if recorded is not None:
        console.print(f"{recorded} results recorded")


def _cells(result: Result) -> list[str]:
    case, figures, recorded = result.case, result.measured.figures, result.case.recorded
    change, gap, bubble, seconds = "-", "-", "-", result.measured.seconds
    if figures is not None:
        gap, bubble, seconds = share_text(figures.gap), share_text(figures.bubble), figures.seconds
        if (share := _change(result)) is not None:
            change = "0" if share == 0 else f"{100 * share:+.2f} %"
    value, bound, recorded_value, public = times_text(
        [
            figures.value_us if figures else None,
            figures.bound_us if figures else None,
            recorded.value_us if recorded else None,
            case.public.value_us if case.public else None,
        ]
    )
    cells = [value, recorded_value, change, bound, gap, bubble, public, f"{seconds:.2f}"]
    return [case.instance, case.method, *cells, _verdict_text(result)]


def _change(result: Result) -> float | None:
    """Relative difference of the value from the recorded one; positive is worse."""
    figures, recorded = result.measured.figures, result.case.recorded
    if figures is None or recorded is None or not recorded.value_us:
        return None
    return figures.value_us / recorded.value_us - 1


def _verdict_text(result: Result) -> str:
    change = result.verdict.change
    text = "REGRESSION" if change == "regression" else change
    proved = result.measured.figures is not None and result.measured.figures.optimal
    return text + (", proved" if proved else "") + (", slow" if result.verdict.slow else "")


def _print_against_public(results: Sequence[Result], method: str) -> None:
    """Compare values and mean bubbles with the best public ones: over all instances, and over those with offload."""
    compared = [
        (result.case, figures, public)
        for result in results
        if (figures := result.measured.figures) and (public := result.case.public)
    ]
    offloading = [entry for entry in compared if any(stage.offload for stage in entry[0].problem.stages)]
    for group, where in ((compared, ""), (offloading, " that may offload")):
        if group:
            above = sum(figures.value_us > public.value_us for _, figures, public in group)
            ours = mean(figures.bubble for _, figures, _ in group)
            theirs = mean(public.bubble(figures) for _, figures, public in group)
            stdout().print(
                f"{method}: above the best public value on {above} of {len(group)} instances{where}; "
                f"mean bubble {share_text(ours)} against {share_text(theirs)}"
            )


def document(
    path: Path, results: Sequence[Result], limits: Limits, interrupted: bool, recorded: int | None
) -> dict[str, Any]:
    """All results as one JSON document; a curve is a list of [seconds, value_us, bound_us, found_by, proved_by]."""
    from importlib.metadata import version

    entries = []
    for result in results:
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
            entries.append(entry | {"why_not": measured.why_not})
            continue
        values = {key: getattr(figures, key) for key in ("value_us", "bound_us", "gap", "bubble")}
        values |= {"found_by": measured.curve[-1].method, "proved_by": measured.curve[-1].proved_by}
        values["status"] = "optimal" if figures.optimal else "feasible"
        entries.append(entry | values | {"change": _change(result), "curve": [list(point) for point in measured.curve]})
    return {
        "suite": str(path),
        "time_limit_s": limits.time_limit_s if limits.deterministic_limit is None else None,
        "deterministic_limit": limits.deterministic_limit,
        "without": sorted(limits.without),
        "workers": limits.workers,
        "seed": limits.seed,
        "version": version("optpipe"),
        "interrupted": interrupted,
        "recorded": recorded,
        "regressions": sum(result.verdict.change == "regression" for result in results),
        "results": entries,
    }
