"""Strategy `auto`: subsolvers side by side in threads, with a shared incumbent.

A small problem goes to proof: after a moment of local search come states of progress, and then CP-SAT has all cores; or
all but one where activations may leave, since good schedules are harder to find there. A large one goes to search:
annealing on one core, patterns, windows and bounds in turns on another, with CP-SAT where memory orders the ops; with a
single core all of them in turns. The larger the problem, the more of the time is the patterns', which alone do not slow
down with the microbatches; the largest have nothing else but annealing. With spread passes there are no patterns.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from threading import Condition, Event, Thread

from optpipe.problem import Problem
from solver.bounds.lower_bound import best_bound
from solver.build import snapped_bound
from solver.exact.memory_order import is_ordered_by_memory
from solver.limits import Cancel, Limits
from solver.microbatch_orders import cycles
from solver.scale import costs_have_codes, count_ops, value_step_us
from solver.searches import SEARCHES, Search, is_ready
from solver.solution import OnProgress, Progress, Solution


@dataclass(frozen=True)
class TimeSlice:
    """A search by its method's name, and the share of the time still left (or of all the work) that a turn may take.

    `rank`: it begins with the start of that rank (`SharedIncumbent.ranked`), else with the best schedule so far.
    """

    method: str
    search: Search
    share: float
    workers: int = 1
    once: bool = False
    rank: int | None = None


Subsolver = Sequence[TimeSlice]

EARLY = 0.95
"""A search that ends before this share of its time has nothing more to try."""

GRACE_S = 0.3
"""Time over the limit in which searches may still end by themselves."""

PAUSE_S = 0.05
"""Between two looks whether the kernels of a search are compiled by now; until then others have its turn."""

SEEDS = 2**31
"""Seeds are taken modulo 2**31, the solvers' range."""

LANE_SEEDS = 1_000_003
"""Between the seeds of two lanes: far more than one has rounds, and prime, so that no two lanes meet."""

_THREAD_NAME = "subsolver"

ENDING_S = 30.0
"""Time in which searches that still run when the interpreter ends may end by themselves."""

_INTERPRETER_ENDS = Cancel()


def run_subsolvers(problem: Problem, shared: SharedIncumbent, subsolvers: Sequence[Subsolver]) -> None:
    """Search until the shared incumbent says stop, the limits are reached, or every subsolver has nothing more to do.

    A search that prepares or ends for long on a large problem is not waited for: the shared incumbent is closed at the
    limit, and what still runs is stopped and its solutions are dropped. An exception in a subsolver stops the others
    and is raised here; one here, such as that of Ctrl-C, stops them all.
    """
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            _run_subsolver(problem, shared, subsolvers[number], idle, number)
        except BaseException as failure:
            failures.append(failure)
            shared.stop.request()
        finally:
            idle[number] = True
            ends[number].set()

    ends, idle = [Event() for _ in subsolvers], [False for _ in subsolvers]
    unlimited = shared.limits.deterministic_limit is not None or shared.limits.time_limit_s == float("inf")
    try:
        with _INTERPRETER_ENDS.calling(shared.stop.request):
            for number in range(len(subsolvers)):
                Thread(target=run, args=(number,), name=_THREAD_NAME, daemon=True).start()
            for ended in ends:  # no `join`: before Python 3.13 one that is interrupted takes the thread for ended
                ended.wait(None if unlimited else shared.limits.time_left_s + GRACE_S)
    finally:
        shared.close()
    if failures:
        raise failures[0]


def wait_for_outlived(seconds: float) -> None:
    """Wait until every search of this process that outlived its limit has ended too, for at most `seconds` in all."""
    until = time.perf_counter() + seconds
    for thread in threading.enumerate():
        if thread.name == _THREAD_NAME:
            thread.join(max(until - time.perf_counter(), 0.0))


@atexit.register
def end_searches() -> None:
    """Stop every search of this process and wait for its end, for at most `ENDING_S`.

    The interpreter ends a thread that is left where it next asks for its lock. In the middle of a solver's C++ that
    aborts the process, whatever the program did before.
    """
    _INTERPRETER_ENDS.request()
    wait_for_outlived(ENDING_S)


def _run_subsolver(
    problem: Problem, shared: SharedIncumbent, subsolver: Subsolver, idle: list[bool], number: int
) -> None:
    """Let the searches of one subsolver take turns; `idle[number]` is True while it waits for a better incumbent.

    Ends at the limit, and when all subsolvers are idle.
    """
    time_slices, unproductive = deque(subsolver), dict[TimeSlice, float]()  # with which value
    taken, limits = 0, shared.limits
    while time_slices and not shared.stop.requested:
        if limits.deterministic_limit is None and limits.seconds >= limits.time_limit_s:
            return
        value_us = shared.best.value_us
        able = [time_slice for time_slice in time_slices if unproductive.get(time_slice) != value_us]
        ready = next((time_slice for time_slice in able if is_ready(time_slice.search)), None)
        idle[number] = not able
        if ready is None:
            if all(idle):
                return
            time.sleep(PAUSE_S)
            continue
        while (time_slice := time_slices.popleft()) is not ready:
            time_slices.append(time_slice)
        if _take(problem, shared, time_slice, taken // len(subsolver)):
            unproductive[time_slice] = value_us
        if not time_slice.once and limits.deterministic_limit is None:
            time_slices.append(time_slice)
        taken += 1


def _take(problem: Problem, shared: SharedIncumbent, time_slice: TimeSlice, round_number: int) -> bool:
    """Let one search run from what the shared incumbent knows now. Returns True if it would only do so again.

    That is where it ended before its time and found nothing, until there is a better incumbent.
    """
    limits = shared.limits.part(time_slice.share)
    seed = (limits.seed + round_number + LANE_SEEDS * limits.lane) % SEEDS
    limits = replace(limits, workers=time_slice.workers, seed=seed, cancel=shared.stop)
    before = shared.best
    start = before if time_slice.rank is None else shared.ranked(time_slice.rank)
    if start is None:
        return True

    def offer(solution: Solution) -> None:
        shared.offer(replace(solution, method=time_slice.method, proved_by=time_slice.method))

    offer(time_slice.search(problem, limits, start, offer))
    return shared.best is before and limits.seconds < EARLY * limits.time_limit_s


class SharedIncumbent:
    """Collects what searches find and tells them when to stop. Safe to use from any thread.

    `stop` is requested as soon as the gap asked for is reached, the problem is proved infeasible, or the caller
    cancels; searches are given it in place of the caller's own.
    """

    def __init__(self, problem: Problem, limits: Limits, on_progress: OnProgress | None) -> None:
        self.problem = problem
        self.limits = limits
        self.stop = Cancel()
        self._on_progress = on_progress
        self._step_us = value_step_us(problem)
        self._lock = Condition()
        self._closed = self._is_reporting = False
        self._reports = deque[Progress]()
        proved_by, bound_us = best_bound(problem, limits.without)
        self._best = Solution(bound_us=bound_us, proved_by=proved_by)
        self._starts = dict[tuple[int, ...], Solution]()
        """The best start of each order of microbatches."""

    def begin(self, start: Solution) -> None:
        """Offer a schedule that no search has found, and keep it if none in its order of microbatches is better."""
        assert start.orders is not None
        order = tuple(start.orders.microbatch_order or ())
        with self._lock:
            if order not in self._starts or start.value_us < self._starts[order].value_us:
                self._starts[order] = start
        self.offer(start)

    def start_us(self, microbatch_order: Sequence[int] | None) -> float:
        """The value of the best start in an order of microbatches; infinity before there is one."""
        start = self._starts.get(tuple(microbatch_order or ()))
        return float("inf") if start is None else start.value_us

    def ranked(self, rank: int) -> Solution | None:
        """The start of this rank, from 0, among the best of each order of microbatches; None beyond the last."""
        with self._lock:
            starts = sorted(self._starts.values(), key=lambda start: start.value_us)
            return replace(starts[rank], bound_us=self._best.bound_us) if rank < len(starts) else None

    @property
    def best(self) -> Solution:
        """The best orders and the best bound, from whichever search; INFEASIBLE where that is proved."""
        return self._best

    def offer(self, solution: Solution) -> None:
        """Keep what is better than all before, and report it to the caller of the solve."""
        with self._lock:
            before = self._best
            if not self._closed:
                self._best = self._merged(solution)
            best = self._best
            if best is not before and best.orders is not None:
                self._reports.append(Progress(best, self.limits.seconds))
        if best.infeasible or self.limits.reached(best.value_us, best.bound_us):
            self.stop.request()
        self._report()

    def _report(self) -> None:
        """Report what is new, one at a time in the order of finding, unless another thread or call is about it.

        No lock is held meanwhile: the caller's `on_progress` may take any time, offer, or ask for the best.
        """
        while True:
            with self._lock:
                if self._is_reporting or not self._reports:
                    return
                self._is_reporting, progress = True, self._reports.popleft()
            try:
                if self._on_progress:
                    self._on_progress(progress)
            finally:
                with self._lock:
                    self._is_reporting = False
                    self._lock.notify_all()

    def close(self) -> None:
        """Stop all searches; nothing that they still find is taken, and all that they found is reported."""
        self.stop.request()
        with self._lock:
            self._closed = True
        self._report()
        with self._lock:
            self._lock.wait_for(lambda: not self._is_reporting)

    def _merged(self, solution: Solution) -> Solution:
        """The better orders of `solution` and the best so far with the higher bound; the best itself if it stays."""
        best = self._best
        improves = solution.orders is not None and solution.value_us < best.value_us
        chosen = solution if improves else best

        def snapped(bound_us: float) -> float:
            return bound_us if chosen.orders is None else snapped_bound(chosen.value_us, bound_us, self._step_us)

        bound_us, proved_by = snapped(best.bound_us), best.proved_by
        if snapped(solution.bound_us) > bound_us:
            bound_us, proved_by = snapped(solution.bound_us), solution.proved_by
        if improves or bound_us > best.bound_us:
            return replace(chosen, bound_us=bound_us, proved_by=proved_by)
        return best


SMALL_OPS = 600
"""Ops, transfers included, up to which CP-SAT is likely to prove an optimum within a minute."""

MOST_STATE_OPS = 1_000
"""Ops up to which states of progress may be few enough to prove something where memory is small."""

LARGE_OPS = 20_000
"""Ops from which annealing and windows reach little of a schedule within a minute."""

MOST_MODEL_OPS = 50_000
"""Ops up to which CP-SAT has a part in it: of more, windows and parts take many seconds to model and heed no limit."""

MOST_PART_OPS = 6_000
"""Ops up to which CP-SAT soon answers whether one device, or a few, can do better than the best schedule.

Between `SMALL_OPS` and `MOST_STATE_OPS` states have that time.
"""


def auto_subsolvers(
    problem: Problem, workers: int, lane: int = 0, without: Set[str] = frozenset()
) -> Sequence[Subsolver]:
    """The subsolvers for a problem of this size on so many cores, in the order of the lane (`Limits.lane`).

    Shares of one subsolver sum up to at most 1. The others of a subsolver have the shares of searches that are left
    out: those `without` names, and annealing where there are too many costs for it.
    """
    left_out = without if costs_have_codes(problem) else without | {"search"}
    subsolvers: Sequence[Subsolver] = [
        _without(left_out, time_slices) for time_slices in _auto_subsolvers(problem, workers)
    ]
    if problem.has_free_order and count_ops(problem) <= MOST_MODEL_OPS:
        subsolvers = with_trials(subsolvers)
    return [[*slices[(at := lane % len(slices)) :], *slices[:at]] for slices in subsolvers if slices]


TRIALS = 4
"""Orders of microbatches with which annealing begins in turn, where the order is free."""

TRIAL_SHARE = 0.03
"""Share of the time for each of them."""


def with_trials(subsolvers: Sequence[Subsolver]) -> Sequence[Subsolver]:
    """Have annealing begin for a moment with each of the best starts of a few orders of microbatches, before all else.

    Annealing changes little in the order: on u-p8-m32-lognormal a start 1 % better led to schedules 7 % longer.
    """
    found = list(subsolvers)
    for number, slices in enumerate(subsolvers):
        annealing = next((one for one in slices if one.method == "search"), None)
        if annealing is not None:
            trials = [replace(annealing, share=TRIAL_SHARE, once=True, rank=rank) for rank in range(TRIALS)]
            left = 1 - TRIALS * TRIAL_SHARE
            found[number] = [*trials, *(replace(one, share=left * one.share) for one in slices)]
            break
    return found


def _without(names: Set[str], subsolver: Subsolver) -> Subsolver:
    kept = [time_slice for time_slice in subsolver if time_slice.method not in names]
    if len(kept) == len(subsolver):
        return subsolver
    total, left = (sum(time_slice.share for time_slice in slices) for slices in (subsolver, kept))
    return [replace(time_slice, share=time_slice.share * total / left) for time_slice in kept]


def _slice(name: str, share: float, workers: int = 1, once: bool = False) -> TimeSlice:
    return TimeSlice(name, SEARCHES[name], share, workers, once)


def _auto_subsolvers(problem: Problem, workers: int) -> Sequence[Subsolver]:
    ops = count_ops(problem)
    if problem.spread or problem.gates:
        return _with_passes(ops, workers)
    if ops <= SMALL_OPS and _leaves(problem):
        # Annealing and windows find the schedules; CP-SAT and parts of a few devices prove them.
        finding = [_slice("search", 0.1), _slice("windows", 0.1)]
        others = max(workers - 1, 1)
        proving = [
            _slice("states", 0.01, others, once=True),
            _slice("cp-sat", 0.7, others),
            _slice("parts", 0.29, others),
        ]
        if workers > 1:
            return [proving, finding]
        return [[*finding, *(replace(one, share=0.8 * one.share) for one in proving)]]
    if ops <= SMALL_OPS:
        return [
            [
                _slice("search", 0.05, workers),
                _slice("states", 0.25, workers, once=True),
                _slice("parts", 0.1, workers),
                _slice("cp-sat", 0.4, workers),
                _slice("windows", 0.1, workers),
                _slice("search", 0.1, workers),
            ]
        ]
    if not _is_plain(problem):
        return _with_units(problem, ops, workers)
    if problem.has_modes:
        return _with_modes(problem, ops, workers)
    first = [_slice("pattern", 0.25 if ops <= LARGE_OPS else 0.5, once=True)]
    if has_lists(problem):
        shares = (0.15, 0.1) if ops <= MOST_MODEL_OPS else (0.4, 0.25)
        first = [_slice("lists", shares[0], once=True), _slice("pattern", shares[1], once=True)]
    if ops <= MOST_STATE_OPS:
        first.append(_slice("states", 0.15, once=True))
    if workers == 1:
        return [[*first, _slice("search", 0.2), *_models(problem, ops, 0.2, 1)]]
    models = _models(problem, ops, 0.35, workers - 1) or [_slice("search", 0.35, workers - 1)]
    return [[_slice("search", 0.35)], [*first, *models]]


def has_lists(problem: Problem) -> bool:
    """True if `auto` makes list schedules of its own for a problem."""
    copies = _leaves(problem) and problem.host_memory_bytes is None
    return count_ops(problem) > SMALL_OPS and _is_plain(problem) and (problem.has_modes or copies)


def _is_plain(problem: Problem) -> bool:
    """True if microbatches are alike and whole, and all backwards may be split."""
    split = all(stage.split_backward for stage in problem.stages)
    return split and problem.has_equal_microbatches


def _leaves(problem: Problem) -> bool:
    """True if activations may have to leave a device for the host."""
    budgets = any(device.memory_bytes is not None for device in problem.devices)
    return budgets and any(stage.offload for stage in problem.stages)


def _with_passes(ops: int, workers: int) -> Sequence[Subsolver]:
    """After a moment of annealing and windows mostly CP-SAT where ops are few; else annealing on one core.

    On the others windows and CP-SAT in turns, up to `MOST_MODEL_OPS`.
    """
    if ops <= SMALL_OPS:
        return [[_slice("search", 0.05, workers), _slice("windows", 0.15, workers), _slice("cp-sat", 0.8, workers)]]
    if ops > MOST_MODEL_OPS:
        return [[_slice("search", 0.5, workers)]]
    others = max(workers - 1, 1)
    low_priority = [_slice("windows", 0.45, others), _slice("cp-sat", 0.05, others)]
    annealing = _slice("search", 0.35)
    return [[annealing, *low_priority]] if workers == 1 else [[annealing], low_priority]


def _with_modes(problem: Problem, ops: int, workers: int) -> Sequence[Subsolver]:
    """Annealing on one core; list schedules and patterns first on the others, then windows and CP-SAT."""
    others = max(workers - 1, 1)
    shares = (0.5, 0.25) if ops > MOST_MODEL_OPS else (0.3 if _leaves(problem) else 0.1, 0.4)
    lists = _slice("lists", shares[0], once=True)
    pattern = _slice("pattern", shares[1], once=True)
    low_priority = [lists, pattern, _slice("search", 0.25, others)]
    if ops <= MOST_MODEL_OPS:
        low_priority += [_slice("windows", 0.15, others), _slice("cp-sat", 0.1, others)]
    return [low_priority] if workers == 1 else [[_slice("search", 0.35)], low_priority]


def _with_units(problem: Problem, ops: int, workers: int) -> Sequence[Subsolver]:
    """Annealing on one core; patterns, where costs repeat, windows and CP-SAT up to `MOST_MODEL_OPS` on the others."""
    annealing = _slice("search", 0.35)
    others = max(workers - 1, 1)
    repeats = all(stage.split_backward for stage in problem.stages) and not problem.has_modes and bool(cycles(problem))
    low_priority = [_slice("pattern", 0.25, once=True)] if repeats else []
    if ops <= MOST_MODEL_OPS:
        low_priority.append(_slice("windows", 0.2 if repeats else 0.35, others))
        low_priority.append(_slice("cp-sat", 0.2 if repeats else 0.25, others))
    if not low_priority:
        return [[_slice("search", 0.5, workers)]]
    if len(low_priority) == 1 and workers > 1:
        low_priority.append(_slice("search", 0.35, others))
    return [[annealing, *low_priority]] if workers == 1 else [[annealing], low_priority]


def _models(problem: Problem, ops: int, share: float, workers: int) -> Subsolver:
    """Windows and bounds, where CP-SAT's models of them are built in time; all of it where memory orders its ops.

    There it proves in seconds, or nearly so, what parts of the problem do not.
    """
    if ops > MOST_MODEL_OPS:
        return []
    windows = _slice("windows", share, workers)
    bound = _slice("relaxation", 0.05, once=True)
    parts = [_slice("parts", 0.15, workers)] if MOST_STATE_OPS < ops <= MOST_PART_OPS else []
    if not is_ordered_by_memory(problem):
        return [*parts, windows, bound]
    return [*parts, _slice("cp-sat", 0.15, workers), windows, bound]
