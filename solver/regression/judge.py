"""Comparison of suite runs with recorded and public values, and updates of the record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from optpipe.units import share_text, time_text
from solver.build import RELATIVE_TOLERANCE
from solver.limits import Limits
from solver.regression.run import Case, Figures, MeasuredRun, Recorded, Suite

SLOW_RATIO = 3.0
"""A proof that takes this many times the recorded seconds is marked slow; machines differ, so it is no regression."""

SHORTEST_S = 0.5
"""Shorter recorded times count as this many seconds: they are mostly noise."""

PUBLIC_ROUNDING = 3e-5
"""Relative error of public values, which can be too low because public schedulers round times. The value of c-real8
along a V, 3717915, is below the work of its first device, 3717920; that of zbv-6.2b at 1.0 is 103 us below the 3969197
of its paper."""

Change = Literal["regression", "better", "same", "new", "no schedule", "interrupted"]


@dataclass(frozen=True)
class SuiteVerdict:
    """Comparison of a run with its record; `findings` are sentences, one for each reason of a regression.

    `contradiction`: run and record cannot both be right, as a bound of one is above the value of the other.
    """

    change: Change
    findings: tuple[str, ...] = ()
    contradiction: bool = False
    slow: bool = False


@dataclass(frozen=True)
class Result:
    """Run of a case, with its verdict."""

    case: Case
    measured: MeasuredRun
    verdict: SuiteVerdict


def judge(case: Case, measured: MeasuredRun, limits: Limits, seconds_ratio: float | None = None) -> SuiteVerdict:
    """Compare a run with the record of its case; more than `seconds_ratio` times its seconds count as a regression."""
    figures, recorded = measured.figures, case.recorded
    if measured.failed:
        return SuiteVerdict("regression", (measured.why_not,))
    if measured.interrupted:
        return SuiteVerdict("interrupted")
    if figures is None:
        if recorded is None:
            return SuiteVerdict("no schedule")
        return SuiteVerdict("regression", (f"no schedule, but one was recorded: {measured.why_not}",))
    public = _above_public(case, figures)
    if recorded is None:
        return SuiteVerdict("regression" if public else "new", public)
    contradictions = _contradictions(recorded, figures)
    worse = [] if contradictions else _worse(recorded, figures, case.tolerance, limits)
    if seconds_ratio is not None and _takes_longer(recorded, figures, seconds_ratio):
        worse.append(
            f"took {figures.seconds:.2f} s, more than {seconds_ratio:g} times the recorded {recorded.seconds:.2f} s. "
            "Maybe the machine is slower or busy."
        )
    timed = limits.deterministic_limit is None  # else the seconds are units of work
    slow = timed and recorded.proved and _takes_longer(recorded, figures, SLOW_RATIO)
    findings = (*contradictions, *worse, *public)
    change: Change = "better" if better(recorded, figures) else "same"
    return SuiteVerdict("regression" if findings else change, findings, bool(contradictions), slow)


def better(recorded: Recorded, figures: Figures) -> bool:
    """Return whether a run has a lower value than recorded, or the same value with a higher bound."""
    if _above(recorded.value_us, figures.value_us):
        return True
    return not _above(figures.value_us, recorded.value_us) and _above(figures.bound_us, recorded.bound_us)


def _supersedes(figures: Figures, recorded: Recorded) -> bool:
    """Return whether a run is better than its record, or as good where that does not say which search found it."""
    as_good = not _above(figures.value_us, recorded.value_us) and not _above(recorded.bound_us, figures.bound_us)
    return better(recorded, figures) or (not recorded.found_by and as_good)


def _above(one_us: float, other_us: float, tolerance: float = 0.0) -> bool:
    """Return whether one exceeds the other by more than a share `tolerance` of it (and by more than rounding)."""
    return one_us > other_us + max(tolerance, RELATIVE_TOLERANCE) * abs(other_us)


def _takes_longer(recorded: Recorded, figures: Figures, ratio: float) -> bool:
    return figures.seconds > ratio * max(recorded.seconds, SHORTEST_S)


def _contradictions(recorded: Recorded, figures: Figures) -> list[str]:
    maybe = "one of the two is wrong. Maybe the problem was changed after it was recorded; otherwise a bound has a bug."
    findings = []
    if _above(recorded.bound_us, figures.value_us):
        findings.append(
            f"value_us is {figures.value_us:.10g}, below the recorded bound_us {recorded.bound_us:.10g}: {maybe}"
        )
    if _above(figures.bound_us, recorded.value_us):
        findings.append(
            f"bound_us is {figures.bound_us:.10g}, above the recorded value_us {recorded.value_us:.10g}: {maybe}"
        )
    return findings


def _worse(recorded: Recorded, figures: Figures, tolerance: float, limits: Limits) -> list[str]:
    """Findings for a higher value, a lost proof and a lower bound; the last ends with the likely reason."""
    findings = []
    if _above(figures.value_us, recorded.value_us, tolerance):
        change = figures.value_us / recorded.value_us - 1 if recorded.value_us else float("inf")
        findings.append(
            f"the value is {time_text(figures.value_us)}, {share_text(change)} above the recorded "
            f"{time_text(recorded.value_us)} (tolerance {share_text(tolerance)})."
        )
    if recorded.proved and not figures.optimal:
        proved = f"{time_text(recorded.value_us)} was proved optimal in {recorded.seconds:.2f} s"
        findings.append(f"a proof is lost: {proved}.")
    elif _above(recorded.bound_us * (1 - tolerance), figures.bound_us):
        findings.append(
            f"the bound is {time_text(figures.bound_us)}, {share_text(1 - figures.bound_us / recorded.bound_us)} below "
            f"the recorded {time_text(recorded.bound_us)} (tolerance {share_text(tolerance)})."
        )
    if findings and recorded.time_limit_s > limits.time_limit_s:
        findings[-1] += f" Maybe the time: {recorded.time_limit_s:g} s when recorded, {limits.time_limit_s:g} s now."
    elif findings and recorded.workers > limits.workers:
        findings[-1] += f" Maybe the cores: {recorded.workers} when recorded, {limits.workers} now."
    return findings


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
    """Return the suite with updated records, and how many were updated.

    A record is one reproducible run, so it is replaced as a whole: a missing one by any run, one that does not say what
    found it by a run as good, others by a better run, or with `force` by any. Runs that were interrupted, failed or
    contradict the record (unless `force`) are not recorded.
    """
    records = {}
    for result in results:
        figures, recorded = result.measured.figures, result.case.recorded
        if figures is None or result.measured.interrupted:
            continue
        if force or recorded is None or (not result.verdict.contradiction and _supersedes(figures, recorded)):
            records[result.case.instance, result.case.method] = Recorded(
                value_us=figures.value_us,
                bound_us=figures.bound_us,
                seconds=figures.seconds,
                time_limit_s=limits.time_limit_s,
                workers=limits.workers,
                version=version("optpipe"),
                found_by=result.measured.curve[-1].method,
                proved_by=result.measured.curve[-1].proved_by,
            )
    entries = [
        entry.model_copy(update={"recorded": records.get((entry.instance, entry.method), entry.recorded)})
        for entry in suite.entries
    ]
    count = sum((entry.instance, entry.method) in records for entry in suite.entries)
    return suite.replaced(entries=list(entries)), count
