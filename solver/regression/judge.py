"""Comparison of suite runs with recorded and public values, and updates of the record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from solver.build import RELATIVE_TOLERANCE
from solver.limits import Limits
from solver.regression.run import Case, Entry, Figures, MeasuredRun, Recorded, Suite

SLOW_RATIO = 3.0
"""A proof that takes this many times the recorded seconds is pointed out; machines differ, so it is no regression."""

SHORTEST_S = 0.5
"""Seconds below this say nothing of a method: they count as this many."""

PUBLIC_ROUNDING = 3e-5
"""The share by which public values may be too low: public schedulers round times. That of c-real8 along a V, 3717915,
is below the work of its first device, 3717920; that of zbv-6.2b at 1.0 is 103 us below the paper's own 3969197."""

Change = Literal["regression", "better", "same", "new", "no schedule", "interrupted"]


@dataclass(frozen=True)
class SuiteVerdict:
    """How a run compares with its record; `findings` say in sentences what makes it a regression.

    `contradiction`: run and record cannot both be right, one of their bounds is above the other's value.
    """

    change: Change
    findings: tuple[str, ...] = ()
    contradiction: bool = False
    slow: bool = False


@dataclass(frozen=True)
class Result:
    """A case that was run, with its verdict."""

    case: Case
    measured: MeasuredRun
    verdict: SuiteVerdict


def judge(case: Case, measured: MeasuredRun, limits: Limits, seconds_ratio: float | None = None) -> SuiteVerdict:
    """Compare a run with the record of its case; with a `seconds_ratio` more seconds than that are a regression."""
    if measured.failed:
        return SuiteVerdict("regression", (measured.why_not,))
    if measured.interrupted:
        return SuiteVerdict("interrupted")
    if measured.figures is None:
        if case.recorded is None:
            return SuiteVerdict("no schedule")
        return SuiteVerdict("regression", (f"no schedule, but one was recorded: {measured.why_not}",))
    return _judge_figures(case, measured.figures, limits, seconds_ratio)


def _judge_figures(case: Case, figures: Figures, limits: Limits, seconds_ratio: float | None) -> SuiteVerdict:
    public, recorded = _above_public(case, figures), case.recorded
    if recorded is None:
        return SuiteVerdict("regression" if public else "new", public)
    impossible = _contradictions(recorded, figures)
    worse = [] if impossible else _worse(recorded, figures, case.tolerance, limits)
    late = _late(recorded, figures, seconds_ratio)
    slow = recorded.proved and _takes_longer(recorded, figures, SLOW_RATIO)
    findings = (*impossible, *worse, *late, *public)
    change: Change = "better" if better(recorded, figures) else "same"
    return SuiteVerdict("regression" if findings else change, findings, bool(impossible), slow)


def better(recorded: Recorded, figures: Figures) -> bool:
    """Whether a schedule has a lower value than recorded, or the same with a higher bound."""
    if _above(recorded.value_us, figures.value_us):
        return True
    return not _above(figures.value_us, recorded.value_us) and _above(figures.bound_us, recorded.bound_us)


def _above(one_us: float, other_us: float, tolerance: float = 0.0) -> bool:
    """Whether one is above the other by more than a share of it (and by more than rounding)."""
    return one_us > other_us + max(tolerance, RELATIVE_TOLERANCE) * abs(other_us)


def _contradictions(recorded: Recorded, figures: Figures) -> list[str]:
    maybe = "one of the two is wrong. Maybe the problem was changed after it was recorded; otherwise a bound has a bug."
    found = []
    if _above(recorded.bound_us, figures.value_us):
        found.append(
            f"value_us is {figures.value_us:.10g}, below the recorded bound_us {recorded.bound_us:.10g}: {maybe}"
        )
    if _above(figures.bound_us, recorded.value_us):
        found.append(
            f"bound_us is {figures.bound_us:.10g}, above the recorded value_us {recorded.value_us:.10g}: {maybe}"
        )
    return found


def _worse(recorded: Recorded, figures: Figures, tolerance: float, limits: Limits) -> list[str]:
    found = []
    if _above(figures.value_us, recorded.value_us, tolerance):
        change = figures.value_us / recorded.value_us - 1 if recorded.value_us else float("inf")
        found.append(
            f"value_us is {figures.value_us:.10g}, {change:.2%} above the recorded {recorded.value_us:.10g} "
            f"(tolerance {tolerance:.2%})."
        )
    if recorded.proved and not figures.optimal:
        found.append(f"a proof is lost: {recorded.value_us:.10g} was proved optimal in {recorded.seconds:.2f} s.")
    elif _above(recorded.bound_us * (1 - tolerance), figures.bound_us):
        found.append(
            f"bound_us is {figures.bound_us:.10g}, below the recorded {recorded.bound_us:.10g} "
            f"(tolerance {tolerance:.2%})."
        )
    if found:
        found[-1] += _other_limits(recorded, limits)
    return found


def _other_limits(recorded: Recorded, limits: Limits) -> str:
    """The likely reason where the record had more time or more cores."""
    if recorded.time_limit_s > limits.time_limit_s:
        return f" Maybe the time: {recorded.time_limit_s:g} s when recorded, {limits.time_limit_s:g} s now."
    if recorded.workers > limits.workers:
        return f" Maybe the cores: {recorded.workers} when recorded, {limits.workers} now."
    return ""


def _late(recorded: Recorded, figures: Figures, ratio: float | None) -> list[str]:
    if ratio is None or not _takes_longer(recorded, figures, ratio):
        return []
    return [
        f"took {figures.seconds:.2f} s, more than {ratio:g} times the recorded {recorded.seconds:.2f} s. "
        "Maybe the machine is slower or busy."
    ]


def _takes_longer(recorded: Recorded, figures: Figures, ratio: float) -> bool:
    return figures.seconds > ratio * max(recorded.seconds, SHORTEST_S)


def _above_public(case: Case, figures: Figures) -> tuple[str, ...]:
    public = case.public
    if not case.never_above_public or public is None or not _above(figures.value_us, public.value_us, PUBLIC_ROUNDING):
        return ()
    share = figures.value_us / public.value_us - 1
    return (
        f"value_us is {figures.value_us:.10g}, {share:.2%} above the {public.value_us:.10g} of a public schedule "
        f"({public.scheduler}).",
    )


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
