"""What `optpipe bench` says: a line a run, the table, the summary, and the JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from optpipe.cli.output import stdout, table
from optpipe.units import number_text, share_text, us_text

if TYPE_CHECKING:
    from solver.bench.judge import Result
    from solver.limits import Limits

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
