"""Limits of a solve: time, gap, threads, seed, and the request to cancel it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TypeVar, cast

from optpipe.errors import InputError, Issue, shown


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Cancel:
    """A request to stop that reaches a solver inside its own search. Safe to use from any thread.

    A copy, such as the one that a process of a pool gets, has requests of its own.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._stops: list[Callable[[], None]] = []
        self._requested = False

    def __reduce__(self) -> tuple[type[Cancel], tuple[()], dict[str, bool]]:
        return Cancel, (), {"_requested": self._requested}

    @property
    def requested(self) -> bool:
        """True once a request was made."""
        return self._requested

    def request(self) -> None:
        """Stop whatever searches now, and whatever would begin to."""
        with self._lock:
            self._requested = True
            stops = list(self._stops)
        for stop in stops:
            stop()

    @contextmanager
    def calling(self, stop: Callable[[], None]) -> Iterator[None]:
        """While in this context a request calls `stop`; at once if it was made before."""
        with self._lock:
            self._stops.append(stop)
            requested = self._requested
        if requested:
            stop()
        try:
            yield
        finally:
            with self._lock:
                self._stops.remove(stop)


Result = TypeVar("Result")


def until_interrupted(work: Callable[[], Result], cancel: Cancel) -> Result:
    """The result of `work`, for which KeyboardInterrupt in the calling thread requests `cancel`. Raises what it raises.

    It runs in another thread than the one that receives the signal, so that an interrupt leaves nothing half done.
    """
    outcome: SimpleQueue[tuple[Result | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:
            outcome.put((None, error))

    thread = Thread(target=run, name="solve", daemon=True)
    while True:
        try:
            if thread.ident is None:
                thread.start()
            result, error = outcome.get()
            break
        except KeyboardInterrupt:
            cancel.request()
    if error is not None:
        raise error
    return cast(Result, result)


@dataclass(frozen=True)
class Limits:
    """Stopping rule: after `time_limit_s`, when ``(value - bound) / value <= gap``, or when `cancel` is set.

    The clock runs from the construction; `time_limit_s` may be infinite. With a `deterministic_limit` no search reads
    the clock to decide anything: it is the work that they may do, in units of about a second each (CP-SAT's
    deterministic time, evaluations of a local search), so that one worker and one seed give the same answer in every
    run. Only `milp` keeps to the time limit even so, because HiGHS counts no work. `lane`: among several solves of one
    problem, 0 is the first; `auto` begins with another search in each, and the seeds differ as well. `without`: names
    of `solver.components` that a measurement leaves out.
    """

    time_limit_s: float = 30.0
    gap: float = 0.0
    workers: int = field(default_factory=available_cores)
    seed: int = 0
    cancel: Cancel = field(default_factory=Cancel)
    began: float = field(default_factory=time.perf_counter)
    deterministic_limit: float | None = None
    lane: int = 0
    without: frozenset[str] = frozenset()

    def check(self) -> None:
        """Raise InputError for each value that is no limit of a solve."""
        issues = []
        numbers = [("time_limit_s", self.time_limit_s, float("inf")), ("gap", self.gap, 1.0)]
        if self.deterministic_limit is not None:
            numbers.append(("deterministic_limit", self.deterministic_limit, float("inf")))
        for name, value, highest in numbers:
            if not (isinstance(value, int | float) and 0 <= value <= highest):
                at_most = f" and at most {highest:g}" if highest < float("inf") else ""
                detail = f"is {shown(value)} but must be a number of at least 0{at_most}."
                issues.append(Issue(name, "out_of_range", detail))
        for name, count, lowest in (("workers", self.workers, 1), ("seed", self.seed, 0)):
            if not isinstance(count, int) or count < lowest:
                detail = f"is {shown(count)} but must be an integer of at least {lowest}."
                issues.append(Issue(name, "out_of_range", detail))
        if issues:
            raise InputError(issues)

    def part(self, share: float) -> Limits:
        """Limits for a part of the search: this share of the time that is left, or of all the work allowed."""
        if self.deterministic_limit is not None:
            return replace(self, deterministic_limit=share * self.deterministic_limit)
        return replace(self, time_limit_s=self.seconds + share * self.time_left_s)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began

    @property
    def time_left_s(self) -> float:
        """Seconds left, at least a hundredth: solvers read 0 as no limit."""
        return max(self.time_limit_s - self.seconds, 0.01)

    def reached(self, value_us: float, bound_us: float) -> bool:
        """True if the requested gap is reached."""
        return value_us < float("inf") and value_us - bound_us <= max(self.gap, 1e-15) * value_us
