"""Local search: simulated annealing from known schedules, in as many threads as there are workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

from optpipe.orders import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.finish import within_budgets
from solver.floor import serial_orders
from solver.limits import Answer, Limits, Start
from solver.search.anneal import BEST, FLOW, State, anneal, begin, state_of
from solver.search.sequence import Merged, copied, merge, orders_of, overwrite
from solver.search.table import Table, table_of

WORK_PER_UNIT = 5e7
"""Ops timed in about a second on one core: the unit of a deterministic limit."""

CHUNK_WORK = 500_000
"""Ops timed between two looks at the limits: some 10 to 20 ms."""

REPORT_WORK_PER_OP = 2500
"""Ops timed, for each op of a schedule, before the next better one is simulated, which takes a tenth of that time."""

FIRST_CYCLE_S = 1.0
"""Length of the first cycle in seconds or units of work; each next one is half as long again."""


class Mood(NamedTuple):
    """How a cycle anneals: its first temperature in mean durations of a compute op, and the weight of early ends."""

    hot: float
    flow: float


MOODS = (Mood(0.02, 0.005), Mood(0.1, 0.002), Mood(0.2, 0.0), Mood(0.03, 0.02))
"""Large problems gain most from cool beginnings, small ones from hot ones; early ends lead across wide plateaus."""

OPS_TO_COOL = 1e7
"""Ops timed, for each op of the schedule, to cool down from a whole mean duration; half as hot takes a quarter."""

COOLING = 20.0
"""First over last temperature of a cycle."""


def local_search(
    problem: Problem,
    limits: Limits,
    start: Start,
    on_answer: Callable[[Answer], None],
    others: Sequence[Orders] = (),
) -> Answer:
    """Anneal from the best schedule known, now and then from `others` within the budgets; report every better answer.

    Without any schedule it begins at the floor. The answer's bound is that of the start: a local search proves nothing.
    """
    found = _Best(problem, start, on_answer)
    table = table_of(problem)
    begins = _begins(problem, table, start, others)
    if begins and not limits.cancel.requested:
        threads = 1 if limits.deterministic_limit is not None else max(1, limits.workers)
        with ThreadPoolExecutor(threads) as pool:
            runs = [pool.submit(_Run(table, begins, limits, found, worker)) for worker in range(threads)]
        for run in runs:
            run.result()
    return found.answer


def _begins(problem: Problem, table: Table, start: Start, others: Sequence[Orders]) -> list[Merged]:
    """Sequences to begin from, best first; orders whose sequences would break a budget are left out."""
    known = [orders for orders in (start.orders, *others) if orders is not None]
    if not known:
        known = [floor for floor in (serial_orders(problem),) if floor is not None]
    timed = sorted((simulate(problem, orders) for orders in known), key=lambda simulation: simulation.value_us)
    merged = (merge(table, simulation) for simulation in timed)
    return [sequences for sequences in merged if state_of(table, sequences, 0) is not None]


class _Best:
    """The best of all threads: the answer, and the sequences that it came from with their value in the kernel."""

    def __init__(self, problem: Problem, start: Start, on_answer: Callable[[Answer], None]) -> None:
        self.problem = problem
        self.answer = Answer(start.orders, start.value_us, start.bound_us)
        self.sequences: Merged | None = None
        self.sequences_us = float("inf")
        self.on_answer = on_answer
        self.lock = Lock()

    def offer(self, table: Table, sequences: Merged, value_us: float) -> bool:
        """Keep and report sequences that are better. False where they break the host's budget."""
        orders = orders_of(self.problem, table, sequences)
        simulation = simulate(self.problem, orders)
        if not within_budgets(self.problem, orders, simulation):
            return False
        with self.lock:
            if value_us < self.sequences_us:
                self.sequences, self.sequences_us = copied(sequences), value_us
            if simulation.value_us < self.answer.value_us:
                self.answer = Answer(orders, simulation.value_us, self.answer.bound_us)
                self.on_answer(self.answer)
        return True


class _Run:
    """The annealing of one thread: cycles that cool down from the best of all threads, or from another start."""

    def __init__(self, table: Table, begins: Sequence[Merged], limits: Limits, found: _Best, worker: int) -> None:
        self.limits = limits
        self.found = found
        self.begins = begins
        self.worker = worker
        self.safe = begins[0]
        state = state_of(table, self.safe, limits.seed * 1009 + worker)
        assert state is not None
        self.state: State = state
        self.scale_us = float(table.classes["duration_us"][: 3 * table.stages].mean())
        self.offered_us = float("inf")
        self.offered_at = 0

    def __call__(self) -> None:
        for number, (first, end) in enumerate(self._cycles()):
            mood = MOODS[(number + self.worker) % len(MOODS)]
            hot = min(mood.hot, self._hottest(end - first))
            self.state.energy_weights[FLOW] = mood.flow
            while not self._over() and self._spent() < end:
                done = min(1.0, (self._spent() - first) / (end - first))
                anneal(self.state, self.scale_us * hot * COOLING**-done, CHUNK_WORK)
                self._offer(patient=True)
            self._offer(patient=False)
            if self._over():
                return
            begin(self.state, self._next_start(number + 1))

    def _cycles(self) -> Iterator[tuple[float, float]]:
        """Begin and end of each cycle; the last one ends with the limit."""
        length, first = FIRST_CYCLE_S, self._spent()
        while True:
            left = self._limit() - first
            end = first + (length if left > 2.5 * length else max(left, 0.01))
            yield first, end
            first, length = end, 1.5 * length

    def _hottest(self, length: float) -> float:
        """The first temperature from which a cycle can cool down in its time: a large problem needs many ops timed."""
        return float((length * WORK_PER_UNIT / (OPS_TO_COOL * self.state.best.length.sum())) ** 0.5)

    def _next_start(self, number: int) -> Merged:
        """The best of all, in every third cycle another start."""
        if number % 3 == 2 and len(self.begins) > 1:
            return self.begins[1 + (number // 3 + self.worker) % (len(self.begins) - 1)]
        better = self.found.sequences_us < self.state.numbers[BEST]
        return self.found.sequences if better and self.found.sequences is not None else self.state.best

    def _spent(self) -> float:
        """Seconds, or units of work, since the search began."""
        if self.limits.deterministic_limit is not None:
            return float(self.state.work[0]) / WORK_PER_UNIT
        return self.limits.seconds

    def _limit(self) -> float:
        deterministic = self.limits.deterministic_limit
        return self.limits.time_limit_s if deterministic is None else deterministic

    def _over(self) -> bool:
        answer = self.found.answer
        return (
            self.limits.cancel.requested
            or self._spent() >= self._limit()
            or self.limits.reached(answer.value_us, answer.bound_us)
        )

    def _offer(self, patient: bool) -> None:
        """Offer the best so far; while `patient` not so often that simulation takes more than a tenth of the time.

        Host memory is looked at here alone; where it is exceeded, the search goes on from its last sequences within it.
        """
        state = self.state
        best_us, work = float(state.numbers[BEST]), int(state.work[0])
        if best_us >= self.offered_us or (patient and work < self.offered_at + self._patience()):
            return
        self.offered_at = work
        if self.found.offer(state.table, state.best, best_us):
            self.offered_us, self.safe = best_us, copied(state.best)
        else:
            overwrite(self.safe, state.best)
            state.numbers[BEST] = self.offered_us
            begin(state, self.safe)

    def _patience(self) -> int:
        return REPORT_WORK_PER_OP * int(self.state.best.length.sum())
