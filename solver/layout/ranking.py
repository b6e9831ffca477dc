"""Which candidate wins: all are judged by published schedules and bounds at once, the promising ones are then solved.

Candidates do the same work (one global batch), so their values compare. One whose proved bound is no better than the
best value found is out, with that bound as the reason. The time is shared in rounds, each for half as many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf

from optpipe.errors import InfeasibleError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.layout.candidates import PUBLISHED_SHARE, Candidate, TimeSlices, late
from solver.limits import Limits
from solver.process import SolverDiedError, solve_in_child
from solver.serial import impossible_budgets
from solver.strategy import SharedIncumbent
from solver.warm_starts import offer_published

ROUNDS = (0.25, 0.35, 0.4)
"""The share of the time for solving that each round has."""

FIRST = 9
"""How many candidates the first round solves; each further round solves a third as many."""


@dataclass(frozen=True)
class Judged:
    """A candidate and what is known of it: the best schedule found, and what none of its schedules can beat."""

    candidate: Candidate
    schedule: Schedule | None
    bound_us: float
    why_not: str = ""

    @property
    def value_us(self) -> float:
        """Of the schedule; infinite without one."""
        return self.schedule.value_us if self.schedule else inf

    @property
    def sequences_per_s(self) -> float:
        """Throughput of the schedule; 0 without one."""
        return 1e6 * self.candidate.sequences / self.value_us if self.value_us else inf

    @property
    def host_peak_bytes(self) -> int:
        """The most that is offloaded at one time."""
        found = self.schedule
        return simulate(found.problem, found.orders).host_memory().peak_bytes if found else 0


OnJudged = Callable[[Judged], None]
"""Called for every candidate as it becomes known, and again for each one that is solved further."""


def rank(candidates: Iterable[Candidate], limits: Limits, on_judged: OnJudged = lambda _: None) -> list[Judged]:
    """All candidates, best first; those without a schedule last. Stops at the time limit or when cancelled."""
    judged: list[Judged] = []
    for candidate in candidates:
        judged.append(_at_once(candidate, limits))
        on_judged(judged[-1])
    for k, share in enumerate(ROUNDS):
        judged = _round(judged, max(1, FIRST // 3**k), limits, share / sum(ROUNDS[k:]), on_judged)
    return [_explained(one, judged[0]) for one in judged]


def _at_once(candidate: Candidate, limits: Limits) -> Judged:
    """The best published schedule and the bound, if there is time."""
    problem = candidate.problem
    if problem is None:
        return Judged(candidate, None, inf, candidate.why_not)
    if impossible := impossible_budgets(problem):
        device, needed, budget = impossible[0]
        return Judged(candidate, None, inf, f"one microbatch needs {needed:,} of {budget:,} bytes on device {device}")
    if late(limits):
        return Judged(candidate, None, inf, "there was no time to look at it")
    return _published(candidate, problem, limits)


def _published(candidate: Candidate, problem: Problem, limits: Limits) -> Judged:
    part = replace(limits, time_limit_s=PUBLISHED_SHARE * limits.time_left_s, began=time.perf_counter())
    shared = SharedIncumbent(problem, part, None)
    with limits.cancel.calling(shared.stop.request):
        offer_published(problem, shared)
    best = shared.best
    if best.orders is None:
        return Judged(candidate, None, best.bound_us)
    schedule = best.to_schedule(problem, 0.0)
    return Judged(candidate, schedule, best.bound_us)


def _round(judged: Sequence[Judged], count: int, limits: Limits, share: float, on_judged: OnJudged) -> list[Judged]:
    """Solve the `count` most promising that may still win, each on one core, and sort anew."""
    ordered = sorted(judged, key=_promise)
    best_us = min((one.value_us for one in ordered), default=inf)
    chosen = [one for one in ordered if _may_win(one, best_us)][:count]
    cores = max(1, min(limits.workers, len(chosen)))
    turns = TimeSlices(limits, share, len(chosen), cores)
    if not chosen or not turns.worthwhile():
        return ordered

    def improved(one: Judged) -> Judged:
        seconds = turns.begin()
        if seconds is None or limits.cancel.requested:
            return one
        better = _solved(one, Limits(seconds, limits.gap, limits.workers // cores, limits.seed, limits.cancel))
        on_judged(better)
        return better

    with ThreadPoolExecutor(cores) as pool:
        results = dict(zip(map(id, chosen), pool.map(improved, chosen), strict=True))
    return sorted((results.get(id(one), one) for one in ordered), key=_promise)


def _promise(one: Judged) -> tuple[float, float]:
    """What is known to be reached first; among those of which nothing is known, the lowest bound."""
    return one.value_us, one.bound_us


def _may_win(one: Judged, best_us: float) -> bool:
    if one.candidate.problem is None or one.bound_us == inf:
        return False
    return one.bound_us < best_us and (one.schedule is None or one.schedule.status != "optimal")


def _solved(one: Judged, limits: Limits) -> Judged:
    problem = one.candidate.problem
    assert problem is not None, "only problems are solved"
    starts = [one.schedule.orders] if one.schedule else []
    try:
        result = solve_in_child(problem, "auto", limits, starts=starts)
    except SolverDiedError as error:
        return one if one.schedule else replace(one, why_not=str(error))
    if isinstance(result.error, InfeasibleError):
        return replace(one, bound_us=inf, why_not=str(result.error))
    found = result.schedule
    if found is None or found.value_us >= one.value_us:
        return replace(one, bound_us=max(one.bound_us, found.bound_us if found else 0.0))
    return replace(one, schedule=found, bound_us=max(one.bound_us, found.bound_us), why_not="")


def _explained(one: Judged, best: Judged) -> Judged:
    """Why a candidate did not win, in words."""
    if one is best or one.why_not:
        return one
    if one.bound_us >= best.value_us:
        return replace(one, why_not="no schedule of it can be better")
    return replace(one, why_not="" if one.schedule else "nothing found that keeps the budgets")
