"""Simulated annealing over merged sequences, compiled: propose, keep the budgets, time, accept or take back.

All compiled code of the search ends up in `anneal` and `begin`. The cache of numba looks only at the file in which a
function stands: after a change of a file that this one imports, clear ``__pycache__``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from solver.search.budgets import keeps_budgets, note_levels
from solver.search.kernel import (
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
from solver.search.loops import copy, equal
from solver.search.moves import UNTOUCHED, clear, copy_touched
from solver.search.proposals import MOVES, OFFLOAD, propose
from solver.search.random import Word, unit
from solver.search.sequence import Merged, copied, overwrite, size
from solver.search.table import MARKS, NONE, Floats, Ints, Table

WEIGHTS = np.array([3.0, 2.0, 1.0, 2.0, 0.5, 1.0, 0.5])
"""How often each kind of move is tried."""

VALUE, MEAN_SPAN, ENERGY, BEST = range(4)
"""Places in `State.numbers`."""

MEAN, FLOW = range(2)
"""Places in `State.energy_weights`."""

PROPOSAL_WORK = 20
"""Ops that could be timed while a change is proposed."""

PLACES_AN_OP = 4
"""Places along which memory is counted while an op is timed."""

MOST_REPAIRS = 5
"""Shifts that may bring a change back into the budgets; how many is drawn for each change."""


class State(NamedTuple):
    """One annealing: the sequences tried and those kept, their times, and the best found.

    Annealing minimizes an energy: the value, plus ``energy_weights[MEAN]`` times the mean span, plus
    ``energy_weights[FLOW]`` times the sum of the ends of all F and B (less what it was at the beginning). Both lead
    across the plateaus of the value. `numbers`: value, mean span and energy of what is kept, best value. `work`: ops
    timed so far (and what costs as much). `start_us`: when each device begins. `levels`: the bytes on its device before
    each place of what is kept. `touched`: where `tried` differs from that. `weights`: how often each kind of move is
    tried.
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


def state_of(table: Table, merged: Merged, seed: int, weights: Floats = WEIGHTS) -> State | None:
    """A state that begins at given sequences, None where these break a budget or deadlock."""
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
        weights=weights if len(table.offloadable) else weights * (np.arange(MOVES) < OFFLOAD),
        energy_weights=np.array([1.0, 0.005]),
    )
    return state if begin(state, merged) else None


@njit(cache=True)
def begin(state: State, merged: Merged) -> bool:
    """Begin (again) at some sequences. False where these break a budget or deadlock."""
    table, groups = state.table, len(state.table.first)
    overwrite(merged, state.kept)
    overwrite(merged, state.tried)
    for g in range(groups):
        state.touched[0, g] = table.first[g]
        state.touched[1, g] = table.first[g] + state.tried.length[g] - 1
        if not keeps_budgets(table, state.tried, state.levels, state.touched, g, 0, True):
            return False
    if not hold_back(table, state.tried, state.times, state.latest):
        return False
    state.work[0] += 3 * size(state.tried)
    copy(state.times.marks[0], state.kept_times.marks[0])
    value, mean = value_us(table, state.times, state.start_us)
    _keep(state, 0, size(state.tried), MARKS + 1, value, mean)
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
        threshold = state.numbers[ENERGY] - temperature_us * np.log(1.0 - unit(state.random))
        propose(
            table,
            state.tried,
            state.kept_times,
            state.latest,
            state.touched,
            state.weights,
            state.random,
        )
        state.work[0] += PROPOSAL_WORK
        mark = _allowed(state)
        if mark == NONE:
            _take_back(state, 0, 0)
            continue
        slack_us = threshold - state.numbers[ENERGY] + 1e-9 * state.numbers[VALUE]
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
        if row > MARKS:
            value, mean = value_us(table, state.times, state.start_us)
        energy = state.numbers[ENERGY] + value - state.numbers[VALUE]
        energy += state.energy_weights[MEAN] * (mean - state.numbers[MEAN_SPAN])
        energy += state.energy_weights[FLOW] * later_us
        if row == NONE or energy > threshold:
            _take_back(state, mark, done)
            continue
        _keep(state, mark, done, row, value, mean)
        state.numbers[ENERGY] = energy
        _note_best(state)
    return bool(state.numbers[BEST] < best)


@njit(cache=True)
def _note_best(state: State) -> None:
    if state.numbers[VALUE] < state.numbers[BEST] * (1 - 1e-12):
        overwrite(state.kept, state.best)
        state.numbers[BEST] = state.numbers[VALUE]


@njit(cache=True)
def _keep(state: State, mark: int, done: int, row: int, value: float, mean: float) -> None:
    """Make what was tried the state kept: its order is new from a mark on, up to `done`, which `row` belongs to."""
    table = state.table
    settled = mark if equal(state.tried.length, state.kept.length) else NONE  # an offload dropped frees its F
    copy_touched(table, state.tried, state.kept, state.touched)
    note_levels(table, state.kept, state.levels, state.touched)
    clear(state.touched)
    for k in range(mark * table.step, done):
        x = state.times.order[k]
        state.kept_times.order[k] = x
        state.kept_times.position[x] = k
        state.kept_times.end_us[x] = state.times.end_us[x]
    for r in range(mark + 1, done // table.step + 1):
        copy(state.times.marks[r], state.kept_times.marks[r])
    if row > MARKS:
        copy(state.times.marks[row], state.kept_times.marks[row])
        set_deadlines(table, state.latest, state.start_us, value)
    state.numbers[VALUE] = value
    state.numbers[MEAN_SPAN] = mean
    state.work[0] += latest_starts(table, state.kept, state.kept_times, state.latest, row, settled)


@njit(cache=True)
def _take_back(state: State, mark: int, done: int) -> None:
    """Make what was tried equal to what is kept again: its order differs from a mark on, up to `done`."""
    table = state.table
    copy_touched(table, state.kept, state.tried, state.touched)
    clear(state.touched)
    for k in range(mark * table.step, done):
        x = state.times.order[k]
        state.times.end_us[x] = state.kept_times.end_us[x]
    for k in range(mark * table.step, done):
        state.times.order[k] = state.kept_times.order[k]
    for r in range(mark + 1, done // table.step + 1):
        copy(state.kept_times.marks[r], state.times.marks[r])


@njit(cache=True)
def _allowed(state: State) -> int:
    """The mark from which the change must be timed, NONE where nothing changed or a budget is broken."""
    table, touched = state.table, state.touched
    repairs = int((MOST_REPAIRS + 1) * unit(state.random))
    pull = unit(state.random) < 0.5
    first = UNTOUCHED
    for g in range(len(table.first)):
        if touched[1, g] < 0:
            continue
        if not keeps_budgets(table, state.tried, state.levels, touched, g, repairs, pull):
            return NONE
        state.work[0] += (touched[1, g] - touched[0, g]) // PLACES_AN_OP
        end = table.first[g] + state.kept.length[g] - 1
        first = min(first, state.kept_times.position[state.kept.ops[min(touched[0, g], end)]])
    return int(first // table.step) if first < UNTOUCHED else NONE
