"""Ranking of candidate layouts: all are rated by published schedules and bounds, the most promising ones then solved.

Candidates do the same work (one global batch), so their values compare. A candidate whose proved bound is no better
than the best value is out. The time is shared in rounds, each for a third as many candidates (successive halving,
Karnin, Koren and Somekh 2013).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf

from optpipe.errors import InfeasibleError
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.layout.candidates import PUBLISHED_SHARE, Candidate, TimeSlices, late
from solver.limits import Limits, until_interrupted
from solver.process import SolverDiedError, solve_in_child
from solver.serial import impossible_budgets
from solver.strategy import SharedIncumbent
from solver.warm_starts import offer_published

ROUNDS = (0.25, 0.35, 0.4)
"""Share of the solving time for each round."""

FIRST_ROUND = 9
"""Candidates solved in the first round; each further round solves a third as many."""


@dataclass(frozen=True)
class Judged:
    """Candidate with its best schedule so far, and the lower bound on all its schedules."""

    candidate: Candidate
    schedule: Schedule | None
    bound_us: float
    why_not: str = ""

    @property
    def value_us(self) -> float:
        """Value of the schedule; infinite without one."""
        return self.schedule.value_us if self.schedule else inf

    @property
    def sequences_per_s(self) -> float | None:
        """Throughput of the schedule in sequences per second; None without one, or where nothing takes time."""
        return 1e6 * self.candidate.sequences / self.value_us if self.schedule and self.value_us else None

    @property
    def recomputed(self) -> int:
        """Activations of a step that the schedule recomputes."""
        return sum(device.recomputed for device in self.schedule.devices) if self.schedule else 0

    @property
    def host_peak_bytes(self) -> int:
        """Peak of the bytes offloaded to the host at one time."""
        schedule = self.schedule
        return simulate(schedule.problem, schedule.orders).host_memory().peak_bytes if schedule else 0


OnJudged = Callable[[Judged], None]
"""Called for every candidate once it is rated, and again after each solve of it."""


def rank(candidates: Iterable[Candidate], limits: Limits, on_judged: OnJudged = lambda _: None) -> list[Judged]:
    """All candidates, best first, those without a schedule last. Stops at the time limit or when cancelled.

    KeyboardInterrupt cancels: the ranking so far is returned, and `limits.cancel.requested` says so. `candidates` and
    `on_judged` are called in other threads.
    """
    return until_interrupted(lambda: _ranked(candidates, limits, on_judged), limits.cancel)


def _ranked(candidates: Iterable[Candidate], limits: Limits, on_judged: OnJudged) -> list[Judged]:
    judged: list[Judged] = []
    for candidate in candidates:
        judged.append(_rate(candidate, limits))
        on_judged(judged[-1])
    for k, share in enumerate(ROUNDS):
        judged = _round(judged, max(1, FIRST_ROUND // 3**k), limits, share / sum(ROUNDS[k:]), on_judged)
    for k, one in enumerate(judged):
        if k and not one.why_not:  # empty for a schedule that is simply slower
            if one.bound_us >= judged[0].value_us:
                judged[k] = replace(one, why_not="no schedule of it can be better")
            elif one.schedule is None:
                judged[k] = replace(one, why_not="nothing found that keeps the budgets")
    return judged


def _rate(candidate: Candidate, limits: Limits) -> Judged:
    """Find the best published schedule and a bound, if there is time."""
    problem = candidate.problem
    if problem is None:
        return Judged(candidate, None, inf, candidate.why_not)
    if impossible := impossible_budgets(problem):
        device, needed, budget = impossible[0]
        return Judged(candidate, None, inf, f"one microbatch needs {needed:,} of {budget:,} bytes on device {device}")
    if late(limits):
        return Judged(candidate, None, inf, "there was no time to look at it")
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
    """Solve the `count` most promising candidates that may still win, in parallel, and sort all again."""

    def by_value(one: Judged) -> tuple[float, float]:
        return one.value_us, one.bound_us  # without a value the lowest bound comes first

    ordered = sorted(judged, key=by_value)
    best_us = min((one.value_us for one in ordered), default=inf)
    promising = [
        one
        for one in ordered
        if one.candidate.problem is not None
        and one.bound_us < best_us  # else not even its bound is better
        and (one.schedule is None or one.schedule.status != "optimal")
    ]
    chosen = promising[:count]
    cores = max(1, min(limits.workers, len(chosen)))
    slices = TimeSlices(limits, share, len(chosen), cores)
    if not chosen or not slices.worthwhile():
        return ordered

    def improved(one: Judged) -> Judged:
        seconds = slices.begin()
        if seconds is None or limits.cancel.requested:
            return one
        better = _solved(one, Limits(seconds, limits.gap, limits.workers // cores, limits.seed, limits.cancel))
        on_judged(better)
        return better

    with ThreadPoolExecutor(cores) as pool:
        results = dict(zip(map(id, chosen), pool.map(improved, chosen), strict=True))
    return sorted((results.get(id(one), one) for one in ordered), key=by_value)


def _solved(one: Judged, limits: Limits) -> Judged:
    """Solve a candidate from its best schedule; a worse result, or a child that dies, keeps that schedule."""
    problem = one.candidate.problem
    assert problem is not None, "only problems are solved"
    starts = [one.schedule.orders] if one.schedule else []
    try:
        result = solve_in_child(problem, "auto", limits, starts=starts)
    except SolverDiedError as error:
        return one if one.schedule else replace(one, why_not=str(error))
    if isinstance(result.error, InfeasibleError):
        return replace(one, bound_us=inf, why_not=str(result.error))
    schedule = result.schedule
    if schedule is None or schedule.value_us >= one.value_us:
        return replace(one, bound_us=max(one.bound_us, schedule.bound_us if schedule else 0.0))
    return replace(one, schedule=schedule, bound_us=max(one.bound_us, schedule.bound_us), why_not="")
