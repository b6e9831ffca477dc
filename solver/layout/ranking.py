"""Ranking of candidate layouts: all are rated by quick schedules and bounds, the most promising ones then solved.

Candidates do the same work (one global batch), so their values compare. A candidate whose proved bound is no better
than the best value is out. All are rated before published schedules are made for any, and before any is solved. The
time is shared in rounds, each for a third as many candidates (successive halving, Karnin, Koren and Somekh 2013).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from optpipe.errors import DeadlockError, InfeasibleError, MethodError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.build import snapped_bound, within_budgets
from solver.by_stage import drop_needless
from solver.layout.candidates import (
    LAST_SHARE,
    LEAST_S,
    PUBLISHED_SHARE,
    RATING_SHARE,
    Candidate,
    TimeSlices,
    late,
    seconds_of_round,
)
from solver.layout.quick_rating import QuickRating
from solver.layout.why import End, at_least_slower
from solver.limits import Limits, until_interrupted
from solver.lists.priority import RULES, list_orders
from solver.process import SolverDiedError, solve_in_child
from solver.scale import costs_have_codes, count_ops
from solver.searches import SEARCHES
from solver.serial import serial_orders
from solver.solution import Solution
from solver.solve import search
from solver.strategy import LARGE_OPS, SharedIncumbent
from solver.warm_starts import offer_published

ROUNDS = (0.25, 0.35, 0.4)
"""Share of the solving time for each round."""

FIRST_ROUND = 9
"""Most candidates solved in the first round; each further round solves a third as many."""

ANNEALED = 0.02
"""Work of the annealing of one candidate: 0.1 seconds of one core. With blocks it begins twice."""

GOOD_S = 5.0
"""Slice below which fewer candidates are solved, the most promising ones; of small problems LEAST_S is enough."""

GOOD_OPS = 1000
"""Ops from which a problem needs all of GOOD_S."""


NO_TIME = "there was no time to look at it"


@dataclass(frozen=True)
class Judged:
    """Candidate with its best schedule so far, and the lower bound on all its schedules.

    `end` is None where the time was too short for one; with a bound that is not below the best value it is `beaten`,
    with or without a schedule. `rated_us`: value of a quick schedule of which only that is known, where the time was
    short; infinite otherwise.
    """

    candidate: Candidate
    schedule: Schedule | None
    bound_us: float
    why_not: str = ""
    solved: bool = False
    rated_us: float = inf
    end: End | None = None

    @property
    def rated(self) -> bool:
        """True if it is known how good it is, or why it is none."""
        return self.why_not != NO_TIME

    @property
    def value_us(self) -> float:
        """Value of the best schedule; infinite without one."""
        return self.schedule.value_us if self.schedule else self.rated_us

    @property
    def sequences_per_s(self) -> float | None:
        """Throughput of the best schedule in sequences per second; None without one, or where nothing takes time."""
        return 1e6 * self.candidate.sequences / self.value_us if 0 < self.value_us < inf else None

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
    judged = _with_published(judged, limits, on_judged)
    for k, share in enumerate(ROUNDS):
        judged = _round(judged, max(1, FIRST_ROUND // 3**k), limits, share / sum(ROUNDS[k:]), on_judged)
    if judged:
        judged[0] = with_schedule(judged[0])
    if judged and judged[0].schedule is None:  # the time was over before any had one
        judged = _with_some_schedule(judged)
    if judged:
        judged[0] = _without_needless(judged[0])
    return [_with_end(one, judged[0]) for one in judged]


def _with_end(one: Judged, best: Judged) -> Judged:
    """The candidate with its end, and the reason where it is no schedule's value."""
    if one.bound_us == inf:
        return replace(one, end="does_not_fit")
    if one is not best and one.bound_us >= best.value_us:
        return replace(one, end="beaten", why_not=at_least_slower(one.bound_us, best.value_us))
    if one.value_us < inf:
        return replace(one, end="solved", bound_us=snapped_bound(one.value_us, one.bound_us))
    return replace(one, why_not=one.why_not or "nothing found that keeps the budgets")


def _rate(candidate: Candidate, limits: Limits) -> Judged:
    """The best quick schedule, and a bound; the value of the schedule alone where the time is short."""
    problem, rating = candidate.problem, candidate.rating
    if problem is None or candidate.why_not:
        return Judged(candidate, None, inf, candidate.why_not)
    if rating is None:
        if late(limits, RATING_SHARE):
            every_cut_us = candidate.every_cut_us if candidate.every_cut_us < inf else 0.0
            return Judged(candidate, None, every_cut_us, NO_TIME)
        rating = QuickRating.of(problem, limits.cancel)
    rated = Judged(candidate, None, rating.bound_us, rated_us=rating.value_us if rating.achieved else inf)
    if late(limits, RATING_SHARE):
        return replace(rated, candidate=replace(candidate, rating=rating))
    rating.bound_in_full()
    return with_schedule(replace(rated, bound_us=rating.bound_us, candidate=replace(candidate, rating=rating)))


def with_schedule(one: Judged) -> Judged:
    """The candidate with its best quick schedule, if it has no schedule yet."""
    rating = one.candidate.rating
    found = None if one.schedule or rating is None else rating.best()
    if rating is None or found is None:
        return one
    method, orders = found
    solution = Solution(orders, simulate(rating.problem, orders).value_us, one.bound_us, method)
    return replace(one, schedule=solution.to_schedule(rating.problem, 0.0))


def _without_needless(one: Judged) -> Judged:
    """The candidate with a schedule that has no copies and recomputations without which it is as good."""
    schedule = one.schedule
    if schedule is None:
        return one
    problem = schedule.problem
    orders = drop_needless(problem, schedule.orders)
    if orders is schedule.orders:
        return one
    solution = Solution(orders, simulate(problem, orders).value_us, schedule.bound_us, schedule.method)
    return replace(one, schedule=solution.to_schedule(problem, schedule.solve_seconds))


def _with_some_schedule(judged: Sequence[Judged]) -> list[Judged]:
    """The candidates sorted, the most promising of which quickly gets a schedule, whatever the time says."""
    result = sorted(judged, key=_promise)
    for k, one in enumerate(result):
        found = None if one.candidate.problem is None else _some_solution(one.candidate.problem, one.bound_us)
        if found is not None:
            result[k] = _judged(one.candidate, found)
            break
    return sorted(result, key=_by_value)


def _some_solution(problem: Problem, bound_us: float) -> Solution | None:
    """Orders of a list, or of one microbatch after another; None where these do not keep the budgets."""
    for method, make in (("priority-lists", partial(list_orders, rule=RULES[0])), ("floor", serial_orders)):
        with suppress(MethodError, DeadlockError):
            orders = make(problem)
            if orders is not None and within_budgets(problem, orders, found := simulate(problem, orders)):
                return Solution(orders, found.value_us, bound_us, method)
    return None


def _judged(candidate: Candidate, best: Solution) -> Judged:
    assert candidate.problem is not None, "only problems have solutions"
    schedule = None if best.orders is None else best.to_schedule(candidate.problem, 0.0)
    return Judged(candidate, schedule, best.bound_us)


def _with_published(judged: Sequence[Judged], limits: Limits, on_judged: OnJudged) -> list[Judged]:
    """Make the published schedules of those that may win and anneal the best, as long as there is time.

    The most promising come first. On a busy machine small ones have more of it: a child that solves one of these takes
    longer to start.
    """
    result = sorted(judged, key=_promise)
    for k, one in enumerate(result):
        best_us = min(other.value_us for other in result)
        small = one.candidate.problem is not None and count_ops(one.candidate.problem) < GOOD_OPS
        if late(limits, LAST_SHARE if small and k < FIRST_ROUND else RATING_SHARE):
            break
        if not _may_win(one, best_us):
            continue
        one = result[k] = with_schedule(one)
        problem = one.candidate.problem
        assert problem is not None, "what may win has a problem"
        part = replace(limits, time_limit_s=PUBLISHED_SHARE * limits.time_left_s, began=time.perf_counter())
        shared = SharedIncumbent(problem, part, None)
        with limits.cancel.calling(shared.stop.request):
            if one.schedule is not None:
                shared.offer(Solution(one.schedule.orders, one.value_us, one.bound_us, one.schedule.method))
            offer_published(problem, shared)
            _anneal(problem, shared)
        if shared.best.value_us < one.value_us:
            result[k] = _judged(one.candidate, shared.best)
            on_judged(result[k])
    return sorted(result, key=_by_value)


def _anneal(problem: Problem, shared: SharedIncumbent) -> None:
    """Anneal the best schedule for a moment, which takes several percent off those of small problems."""
    if shared.best.orders is None or shared.stop.requested or count_ops(problem) > LARGE_OPS:
        return
    limits = replace(shared.limits, workers=1, deterministic_limit=ANNEALED, cancel=shared.stop)
    has_table = not (problem.overlaps and (problem.has_modes or problem.spread or problem.gates))
    if costs_have_codes(problem) and has_table:
        shared.offer(replace(SEARCHES["search"](problem, limits, shared.best, lambda _: None), method="search"))
    if problem.overlaps and shared.best.orders is not None:  # and from orders of ops apart, with neighbours joined
        shared.offer(replace(search(problem, "search", limits, starts=[shared.best.orders]), method="search"))


def _by_value(one: Judged) -> tuple[float, float]:
    return one.value_us, one.bound_us  # without a value the lowest bound comes first


def _promise(one: Judged) -> tuple[float, float]:
    """Halfway between value and bound: a search often comes close to the bound; without a value by that alone."""
    return (one.value_us + one.bound_us) / 2, one.bound_us


def _may_win(one: Judged, best_us: float) -> bool:
    open_yet = one.schedule is None or one.schedule.status != "optimal"
    return one.candidate.problem is not None and one.bound_us < best_us and open_yet


def _round(judged: Sequence[Judged], count: int, limits: Limits, share: float, on_judged: OnJudged) -> list[Judged]:
    """Solve the `count` most promising candidates that may still win, in parallel, and sort all again.

    Where only one may win it has all the time left. But in the last round, those among the first `FIRST_ROUND` that the
    time of no round has sufficed for come first: a second solve of a small problem gains less than its first one.
    """
    ordered = sorted(judged, key=_by_value)
    best_us = min((one.value_us for one in ordered), default=inf)
    promising = sorted((one for one in ordered if _may_win(one, best_us)), key=_promise)
    if len(promising) == 1:
        share = 1.0  # no round after this one needs time
    if count > 1:
        promising = sorted(promising[: max(count, FIRST_ROUND)], key=lambda one: one.solved)
    in_time = limits.workers * (seconds_of_round(limits, share) // _good_s(promising))
    chosen = promising[: max(1, int(min(in_time, count)))]
    cores = max(1, min(limits.workers, len(chosen)))
    slices = TimeSlices(limits, share, len(chosen), cores)
    if not chosen or not slices.worthwhile():
        return ordered

    def improved(one: Judged) -> Judged:
        one, seconds = with_schedule(one), slices.begin()
        if seconds is None or limits.cancel.requested:
            return one
        better = _solved(one, Limits(seconds, limits.gap, limits.workers // cores, limits.seed, limits.cancel))
        on_judged(better)
        return better

    with ThreadPoolExecutor(cores) as pool:
        results = dict(zip(map(id, chosen), pool.map(improved, chosen), strict=True))
    return sorted((results.get(id(one), one) for one in ordered), key=_by_value)


def _good_s(candidates: Sequence[Judged]) -> float:
    """Seconds that a solve of the largest candidate should have.

    Where memory is tight, quick schedules of small problems may be far from what a search finds at once.
    """
    problems = [one.candidate.problem for one in candidates if one.candidate.problem is not None]
    ops = max(map(count_ops, problems), default=0)
    return max(LEAST_S, GOOD_S * min(1.0, ops / GOOD_OPS))


def _solved(one: Judged, limits: Limits) -> Judged:
    """Solve a candidate from its best schedule; a worse result, or a child that dies, keeps that schedule."""
    problem = one.candidate.problem
    assert problem is not None, "only problems are solved"
    one = replace(one, solved=True)
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
