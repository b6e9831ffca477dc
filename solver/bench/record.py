"""Rewriting the record of a suite with what a run gave."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from solver.bench.judge import Result, better
from solver.bench.suite import Entry, Recorded, Suite
from solver.limits import Limits


def with_records(suite: Suite, results: Sequence[Result], limits: Limits, force: bool) -> tuple[Suite, int]:
    """The suite with new records, and how many those are.

    A record is one run that can be repeated, so it is replaced as a whole: where there was none, by a better run, with
    `force` by any. Runs that were interrupted, failed or contradict the record (unless `force`) are not recorded.
    """
    taken = {
        (result.case.instance, result.case.method): _recorded(result, limits)
        for result in results
        if _worth_recording(result, force)
    }
    entries = [_with_record(entry, taken.get((entry.instance, entry.method))) for entry in suite.entries]
    count = sum(old is not new for old, new in zip(suite.entries, entries, strict=True))
    return Suite.from_data(suite.to_data() | {"entries": [entry.to_data() for entry in entries]}), count


def _worth_recording(result: Result, force: bool) -> bool:
    figures, recorded = result.measured.figures, result.case.recorded
    if figures is None or result.measured.interrupted:
        return False
    return force or recorded is None or (not result.verdict.contradiction and better(recorded, figures))


def _recorded(result: Result, limits: Limits) -> Recorded:
    figures = result.measured.figures
    assert figures is not None
    return Recorded(
        value_us=figures.value_us,
        bound_us=figures.bound_us,
        seconds=figures.seconds,
        time_limit_s=limits.time_limit_s,
        workers=limits.workers,
        version=version("optpipe"),
    )


def _with_record(entry: Entry, recorded: Recorded | None) -> Entry:
    return entry if recorded is None else entry.model_copy(update={"recorded": recorded})
