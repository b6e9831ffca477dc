"""One method on one problem: the schedule or why there is none, and how value and bound came down over time."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import NamedTuple

from optpipe.errors import InfeasibleError, MethodError, NoSolutionError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver import searches
from solver.lanes import wait_for_outlived
from solver.limits import Limits
from solver.portfolio import Progress, solve_until_interrupted

MOST_OUTLIVED_S = 60.0
"""How long the next run waits for a search that outlives its limit: HiGHS, or the building of a large model."""


class Point(NamedTuple):
    """What was known `seconds` after the start, and the method that had found the value."""

    seconds: float
    value_us: float
    bound_us: float
    method: str


@dataclass(frozen=True)
class Figures:
    """The figures of a verified schedule. The schedule itself is let go: a suite has hundreds of MB of them."""

    value_us: float
    bound_us: float
    gap: float
    bubble: float
    seconds: float
    optimal: bool

    @classmethod
    def of(cls, schedule: Schedule) -> Figures:
        """The figures of a schedule."""
        optimal = schedule.status == "optimal"
        value_us, bound_us, seconds = schedule.value_us, schedule.bound_us, schedule.solve_seconds
        return cls(value_us, bound_us, schedule.gap, schedule.bubble, seconds, optimal)


@dataclass(frozen=True)
class Measured:
    """A run: the figures of its schedule, or `why_not` there is none; `failed` where the reason is a bug.

    `curve` begins with the first schedule; its values fall and its bounds rise. An `interrupted` run was stopped by
    the user before its time.
    """

    figures: Figures | None
    why_not: str
    failed: bool
    seconds: float
    interrupted: bool
    curve: tuple[Point, ...]

    def at(self, seconds: float) -> Point | None:
        """What was known `seconds` after the start; None before the first schedule."""
        known = [point for point in self.curve if point.seconds <= seconds]
        return known[-1] if known else None

    @property
    def proof_seconds(self) -> float | None:
        """Seconds until value and bound met; None if they did not."""
        return self.curve[-1].seconds if self.figures and self.figures.optimal else None

    def seconds_to(self, value_us: float) -> float | None:
        """Seconds until a schedule at least as good as `value_us` was known; None if it never was."""
        return next((point.seconds for point in self.curve if point.value_us <= value_us), None)


def measure(problem: Problem, method: str, limits: Limits) -> Measured:
    """Run a method; Ctrl-C stops it and keeps what it has. A bug in a method is an outcome too, never an exception.

    The clock begins when all searches are loaded. The run is in this process: the start of a child, and the pauses that
    it makes between two incumbents, would be measured as well. The figures are those at the limit, whatever the search
    does. One that goes on all the same is waited for before this returns, so that it does not slow the next run.
    """
    searches.load()
    limits = replace(limits, began=time.perf_counter())
    curve: list[Point] = []

    def note(progress: Progress) -> None:
        curve.append(Point(progress.seconds, progress.value_us, progress.bound_us, progress.method))

    figures, why_not, failed = None, "", False
    try:
        schedule = solve_until_interrupted(problem, method, limits, note)
        figures = Figures.of(schedule)
        last = Point(figures.seconds, figures.value_us, figures.bound_us, schedule.method)
        if not curve or curve[-1][1:3] != last[1:3]:
            curve.append(last)
    except (MethodError, InfeasibleError, NoSolutionError) as error:
        why_not = str(error)
    except Exception as error:
        why_not, failed = f"{type(error).__name__}: {error}", True
    seconds = limits.seconds
    if not limits.cancel.requested:
        _let_end(limits)
    return Measured(figures, why_not, failed, seconds, limits.cancel.requested, tuple(curve))


def _let_end(limits: Limits) -> None:
    """Wait for searches that outlive their limit; Ctrl-C ends this as well."""
    try:
        wait_for_outlived(MOST_OUTLIVED_S)
    except KeyboardInterrupt:
        limits.cancel.request()
