"""Simulated annealing (Kirkpatrick, Gelatt and Vecchi 1983) over merged sequences, in as many threads as a solve has.

Representation, moves and timing are those of docs/math/search.md. All compiled code of the search ends up in `anneal`
and `begin_annealing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

import numpy as np
from numba import njit

from optpipe.ops import Floats, Ints
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import within_budgets
from solver.limits import Limits
from solver.search.annealing.edits import UNTOUCHED, clear, copy_touched, keeps_budgets, note_levels, saved_us, widen
from solver.search.annealing.kernel import (
    NEVER_US,
    Latest,
    Times,
    empty_latest,
    empty_times,
    hold_back,
    latest_starts,
    set_deadlines,
    sweep,
    value_us,
)
from solver.search.annealing.moves import EXCHANGE, JOIN, MOVES, OFFLOAD, OPTION, RELAY, REORDER, propose
from solver.search.annealing.sequence import (
    Merged,
    Word,
    copied,
    copy,
    equal,
    merge,
    orders_from_sequences,
    overwrite,
    size,
    unit,
    variable,
)
from solver.search.annealing.table import MARKS, NONE, Table, build_table
from solver.serial import serial_orders
from solver.solution import OnSolution, Solution

WEIGHTS = np.array([3.0, 2.0, 1.0, 2.0, 0.5, 1.0, 0.5, 1.0, 1.0, 1.0, 2.0])
"""Relative frequency of each kind of move; those without an object in a problem have none there."""

VALUE, MEAN_SPAN, ENERGY, BEST = range(4)
"""Indices into `State.numbers`."""

MEAN, FLOW, SAVED = range(3)
"""Indices into `State.energy_weights`."""

PROPOSAL_WORK = 20
"""Cost of proposing a move, in ops timed."""

PLACES_AN_OP = 4
"""Places along which memory is counted at the cost of one op timed."""

MOST_REPAIRS = 5
"""Largest number of shifts that bring a move back into the budgets; the number is drawn for each move."""


class State(NamedTuple):
    """One annealing: the sequences tried and those kept, their times, and the best sequences.

    Annealing minimizes an energy: the value, plus ``energy_weights[MEAN]`` times the mean span, plus
    ``energy_weights[FLOW]`` times the sum of the ends of all F and B, less ``energy_weights[SAVED]`` times what blocks
    save a device in the mean (both less what they were at the beginning). They lead across the plateaus of the value:
    early ends leave room, and one block alone only makes its device wait, where many make all devices faster.
    `numbers`: value, mean span and energy of what is kept, best value. `work`: ops timed so far, with the cost of the
    rest in ops timed. `start_us`: when each device begins. `levels`: the bytes on its device before each place of what
    is kept. `touched`: where `tried` differs from that. `weights`: relative frequency of each kind of move.
    """

    table: Table
    tried: Merged
    kept: Merged
    best: Merged
    times: Times
    kept_times: Times
    latest: Latest
    start_us: Floats
    levels: Ints
    touched: Ints
    numbers: Floats
    work: Ints
    random: Word
    weights: Floats
    energy_weights: Floats


def build_state(table: Table, merged: Merged, seed: int) -> State | None:
    """Build a state that begins at given sequences; None where these break a budget or deadlock."""
    state = State(
        table=table,
        tried=copied(merged),
        kept=copied(merged),
        best=copied(merged),
        times=empty_times(table),
        kept_times=empty_times(table),
        latest=empty_latest(table),
        start_us=np.zeros(table.devices),
        levels=np.zeros(len(merged.ops), np.int64),
        touched=np.zeros((2, len(table.first)), np.int64),
        numbers=np.full(4, NEVER_US),
        work=np.zeros(1, np.int64),
        random=np.array([2 * seed + 1], np.uint64),
        weights=WEIGHTS * _possible_moves(table),
        energy_weights=np.array([1.0, 0.005, 0.0]),
    )
    return state if begin_annealing(state, merged) else None


def _possible_moves(table: Table) -> Ints:
    """1 for each kind of move that a problem has an object for, else 0."""
    kinds = np.arange(MOVES)
    modes = table.options > 1 and not table.has_blocks
    choices = (kinds == OPTION) | (kinds == EXCHANGE) if modes else (kinds == OFFLOAD) | (kinds == RELAY)
    possible = (kinds < OFFLOAD) | (choices & (len(table.choosing) > 0))
    possible |= ((kinds == REORDER) & table.free_order) | ((kinds == JOIN) & table.has_blocks)
    return np.asarray(possible, np.int64)


@njit(cache=True)
def begin_annealing(state: State, merged: Merged) -> bool:
    """Begin, or begin again, at some sequences. False where these break a budget or deadlock."""
    table, groups = state.table, len(state.table.first)
    overwrite(merged, state.kept)
    overwrite(merged, state.tried)
    for g in range(groups):
        state.touched[0, g] = table.first[g]
        state.touched[1, g] = table.first[g] + state.tried.length[g] - 1
        if not keeps_budgets(table, state.tried, state.levels, state.touched, g, variable(0), variable(0)):
            return False
    if not hold_back(table, state.tried, state.times, state.latest):
        return False
    state.work[0] += 3 * size(state.tried)
    copy(state.times.marks[0], state.kept_times.marks[0])
    value, mean = value_us(table, state.tried, state.times, state.start_us)
    _accept(state, variable(0), size(state.tried), MARKS + 1, value, mean)
    state.numbers[ENERGY] = value
    _note_best(state)
    return True


@njit(cache=True, nogil=True)
def anneal(state: State, temperature_us: float, work: int) -> bool:
    """Anneal at one temperature until `work` ops were timed. Returns whether a better value was found."""
    table = state.table
    limit = state.work[0] + work
    best = state.numbers[BEST]
    while state.work[0] < limit:
        # The Metropolis rule, accept with probability exp(-rise / temperature), with its random number drawn first: so
        # the rise that would still be accepted is known before timing, and a sweep can stop as soon as it exceeds that.
        threshold = state.numbers[ENERGY] - temperature_us * np.log(1.0 - unit(state.random))
        possible = propose(
            table,
            state.tried,
            state.kept_times,
            state.latest,
            state.touched,
            state.weights,
            state.random,
        )
        state.work[0] += PROPOSAL_WORK
        mark = _first_mark(state) if possible else NONE
        if mark == NONE:
            _revert(state, mark, mark * table.step)
            continue
        bonus = 0.0
        if table.has_blocks:
            bonus = saved_us(table, state.tried, state.touched) - saved_us(table, state.kept, state.touched)
            bonus *= state.energy_weights[SAVED] / table.devices
        # A share of the value above the threshold, for sums of floats in another order.
        slack_us = threshold - state.numbers[ENERGY] + bonus + 1e-9 * state.numbers[VALUE]
        done, row, later_us = sweep(
            table,
            state.tried,
            state.kept_times,
            state.times,
            mark,
            state.latest,
            slack_us,
            state.touched,
        )
        state.work[0] += done - mark * table.step
        value, mean = state.numbers[VALUE], state.numbers[MEAN_SPAN]
        if row > MARKS:  # a sweep that met its old state again leaves the ends of all devices as they were
            value, mean = value_us(table, state.tried, state.times, state.start_us)
        energy = state.numbers[ENERGY] + value - state.numbers[VALUE]
        energy += state.energy_weights[MEAN] * (mean - state.numbers[MEAN_SPAN])
        energy += state.energy_weights[FLOW] * later_us - bonus
        if row == NONE or energy > threshold:
            _revert(state, mark, done)
            continue
        _accept(state, mark, done, row, value, mean)
        state.numbers[ENERGY] = energy
        _note_best(state)
    return bool(state.numbers[BEST] < best)


@njit(cache=True)
def _note_best(state: State) -> None:
    if state.numbers[VALUE] < state.numbers[BEST] * (1 - 1e-12):
        overwrite(state.kept, state.best)
        state.numbers[BEST] = state.numbers[VALUE]


@njit(cache=True)
def _accept(state: State, mark: int, done: int, row: int, value: float, mean: float) -> None:
    """Make what was tried the state kept: its order is new from a mark on, up to `done`, which `row` belongs to."""
    table = state.table
    # Before the mark ops are as they were. But a dropped offload no longer bounds the latest start of its F, which may
    # stand before the mark: then the backward sweep goes on to the first op.
    settled = mark if equal(state.tried.length, state.kept.length) else NONE
    copy_touched(table, state.tried, state.kept, state.touched)
    note_levels(table, state.kept, state.levels, state.touched)
    clear(state.touched)
    for k in range(mark * table.step, done):
        state.kept_times.order[k] = state.times.order[k]
        x = state.times.order[k] & table.key_mask
        state.kept_times.position[x] = k
        state.kept_times.end_us[x] = state.times.end_us[x]
    for r in range(mark + 1, done // table.step + 1):
        copy(state.times.marks[r], state.kept_times.marks[r])
    for r in range((size(state.kept) - 1) // table.step + 1, MARKS + 1):
        state.kept_times.marks[r, 0] = NEVER_US  # those of longer sequences, which a sweep could meet again
    if row > MARKS:  # else value and deadlines are as before
        copy(state.times.marks[row], state.kept_times.marks[row])
        set_deadlines(table, state.latest, state.start_us, value)
    state.numbers[VALUE] = value
    state.numbers[MEAN_SPAN] = mean
    state.work[0] += latest_starts(table, state.kept, state.kept_times, state.latest, row, settled)


@njit(cache=True)
def _revert(state: State, mark: int, done: int) -> None:
    """Make what was tried equal to what is kept again: its order differs from a mark on, up to `done`."""
    table = state.table
    copy_touched(table, state.kept, state.tried, state.touched)
    clear(state.touched)
    for k in range(mark * table.step, done):
        x = state.times.order[k] & table.key_mask
        state.times.end_us[x] = state.kept_times.end_us[x]
    for k in range(mark * table.step, done):
        state.times.order[k] = state.kept_times.order[k]
    for r in range(mark + 1, done // table.step + 1):
        copy(state.kept_times.marks[r], state.times.marks[r])


@njit(cache=True)
def _first_mark(state: State) -> int:
    """The mark from which the move must be timed, NONE where nothing changed or a budget is broken."""
    table, touched = state.table, state.touched
    repairs = int((MOST_REPAIRS + 1) * unit(state.random))
    pull = int(unit(state.random) < 0.5)
    first = UNTOUCHED
    for g in range(len(table.first)):
        if touched[1, g] < 0:
            continue
        widen(table, state.tried, touched, g)
        if not keeps_budgets(table, state.tried, state.levels, touched, g, repairs, pull):
            return NONE
        if table.has_blocks:  # repairs may have joined and parted ops
            widen(table, state.tried, touched, g)
            if not keeps_budgets(table, state.tried, state.levels, touched, g, variable(0), pull):
                return NONE
        state.work[0] += (touched[1, g] - touched[0, g]) // PLACES_AN_OP
        end = table.first[g] + state.kept.length[g] - 1
        first = min(first, state.kept_times.position[state.kept.ops[min(touched[0, g], end)] & table.key_mask])
    return int(first // table.step) if first < UNTOUCHED else NONE


WORK_PER_UNIT = 5e7
"""Ops timed in about a second on one core: the unit of a deterministic limit."""

CHUNK_WORK = 500_000
"""Ops timed between two checks of the limits: some 10 to 20 ms."""

REPORT_WORK_PER_OP = 2500
"""Ops timed, for each op of a schedule, before the next better one is simulated, which takes a tenth of that time."""

FIRST_CYCLE_S = 1.0
"""Length of the first cycle in seconds or units of work; each next one is half as long again."""


class Cooling(NamedTuple):
    """Cooling schedule of a cycle: first temperature, in mean durations of a compute op; weights in the energy."""

    temperature: float
    flow: float
    saved: float


COOLINGS = (Cooling(0.02, 0.005, 1.0), Cooling(0.1, 0.002, 4.0), Cooling(0.2, 0.0, 4.0), Cooling(0.03, 0.02, 0.0))
"""Large problems gain most from cool beginnings, small ones from hot ones; early ends lead across wide plateaus."""

OPS_TO_COOL = 1e7
"""Ops timed, for each op of the schedule, to cool down from a whole mean duration; half as hot takes a quarter."""

COOLING_FACTOR = 20.0
"""First over last temperature of a cycle."""


def local_search(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Anneal from the best schedule known, or from the serial one; report every better answer.

    The answer's bound is that of the start: a local search proves nothing. Returns `start` where its orders, or the
    serial ones, exceed a budget.
    """
    table = build_table(problem)
    orders = serial_orders(problem) if start.orders is None else start.orders
    if orders is None or limits.cancel.requested:
        return start
    first = merge(table, simulate(problem, orders))
    if build_state(table, first, 0) is None:
        return start
    best = _SharedBest(problem, start, on_solution)
    threads = 1 if limits.deterministic_limit is not None else max(1, limits.workers)
    with ThreadPoolExecutor(threads) as pool:
        runs = [pool.submit(_Thread(table, first, limits, best, worker)) for worker in range(threads)]
    for run in runs:
        run.result()
    return best.answer


def _mean_duration_us(table: Table, merged: Merged) -> float:
    """The mean duration of F, B and W, over all stages and units."""
    numbers, counts = np.unique(merged.ops[merged.place[: table.units]] >> table.option_shift, return_counts=True)
    firsts = (numbers // table.options * table.options) << (table.option_shift - table.shift)
    means = [table.classes["duration_us"][first : first + 3 * table.stages].mean() for first in firsts]
    return float(np.average(means, weights=counts / counts.sum()))


class _SharedBest:
    """The best of all threads: the answer, and the sequences that it came from with their value in the kernel."""

    def __init__(self, problem: Problem, start: Solution, on_solution: OnSolution) -> None:
        self.problem = problem
        self.answer = start
        self.sequences: Merged | None = None
        self.sequences_us = float("inf")
        self.on_solution = on_solution
        self.lock = Lock()

    def offer(self, table: Table, sequences: Merged, value_us: float) -> bool:
        """Keep and report sequences that are better. False where they break the host's budget."""
        orders = orders_from_sequences(self.problem, table, sequences)
        simulation = simulate(self.problem, orders)
        if not within_budgets(self.problem, orders, simulation):
            return False
        with self.lock:
            if value_us < self.sequences_us:
                self.sequences, self.sequences_us = copied(sequences), value_us
            better = simulation.value_us < self.answer.value_us
            if better:
                self.answer = Solution(orders, simulation.value_us, self.answer.bound_us)
            answer = self.answer
        if better:
            self.on_solution(answer)
        return True


class _Thread:
    """The annealing of one thread: cycles that cool down, the first from `start`, the others from the best so far."""

    def __init__(self, table: Table, start: Merged, limits: Limits, best: _SharedBest, worker: int) -> None:
        self.limits = limits
        self.best = best
        self.worker = worker
        self.within_budgets = start
        """The last sequences that also keep the host's budget."""
        state = build_state(table, start, limits.seed * 1009 + worker)
        assert state is not None
        self.state: State = state
        self.mean_duration_us = _mean_duration_us(table, start)
        self.offered_us = float("inf")
        self.offered_at = 0

    def __call__(self) -> None:
        for number, (first, end) in enumerate(self._cycles()):
            cooling = COOLINGS[(number + self.worker) % len(COOLINGS)]
            # A cycle begins no hotter than it can cool down from in its time: a large problem needs many ops timed.
            ops_to_cool = OPS_TO_COOL * self.state.best.length.sum()
            hottest = float(((end - first) * WORK_PER_UNIT / ops_to_cool) ** 0.5)
            temperature_us = self.mean_duration_us * min(cooling.temperature, hottest)
            self.state.energy_weights[FLOW], self.state.energy_weights[SAVED] = cooling.flow, cooling.saved
            while not self._over() and self._spent() < end:
                done = min(1.0, (self._spent() - first) / (end - first))
                table = self.state.table
                if table.spans and (table.free_order or table.links is not None):
                    begin_annealing(self.state, self.state.kept)  # when devices may begin depends on the order
                anneal(self.state, temperature_us * COOLING_FACTOR**-done, CHUNK_WORK)
                self._offer(REPORT_WORK_PER_OP * int(self.state.best.length.sum()))
            self._offer(0)
            if self._over():
                return
            restart = self.best.sequences  # of all threads
            if restart is None or self.best.sequences_us >= self.state.numbers[BEST]:
                restart = self.state.best
            begin_annealing(self.state, restart)

    def _cycles(self) -> Iterator[tuple[float, float]]:
        """Begin and end of each cycle; the last one ends with the limit."""
        length, first = FIRST_CYCLE_S, self._spent()
        while True:
            left = self._limit() - first
            end = first + (length if left > 2.5 * length else max(left, 0.01))
            yield first, end
            first, length = end, 1.5 * length

    def _spent(self) -> float:
        """Seconds, or units of work, since the search began."""
        if self.limits.deterministic_limit is not None:
            return float(self.state.work[0]) / WORK_PER_UNIT
        return self.limits.seconds

    def _limit(self) -> float:
        deterministic = self.limits.deterministic_limit
        return self.limits.time_limit_s if deterministic is None else deterministic

    def _over(self) -> bool:
        answer = self.best.answer
        return (
            self.limits.cancel.requested
            or self._spent() >= self._limit()
            or self.limits.reached(answer.value_us, answer.bound_us)
        )

    def _offer(self, interval: int) -> None:
        """Offer the best so far, if it is better than the last offered and `interval` ops were timed since then.

        Only here is the host's memory counted: sequences of one group know nothing of the host's level, to which all
        groups add. Where it is exceeded, the search goes on from its last sequences within it.
        """
        state = self.state
        best_us, work = float(state.numbers[BEST]), int(state.work[0])
        if best_us >= self.offered_us or work < self.offered_at + interval:
            return
        self.offered_at = work
        if self.best.offer(state.table, state.best, best_us):
            self.offered_us, self.within_budgets = best_us, copied(state.best)
        else:
            overwrite(self.within_budgets, state.best)
            state.numbers[BEST] = self.offered_us
            begin_annealing(state, self.within_budgets)
