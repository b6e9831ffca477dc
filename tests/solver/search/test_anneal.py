"""What annealing keeps is what it says: times, latest starts, levels and value, after any number of changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.any_timing import any_timing_peak_bytes
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.floor import serial_orders
from solver.search.anneal import BEST, MEAN_SPAN, VALUE, State, anneal, state_of
from solver.search.kernel import empty_latest, empty_times, latest_starts, set_deadlines, sweep, value_us
from solver.search.sequence import copied, merge, orders_of
from solver.search.table import MARKS, NONE, table_of
from tests.problems import HALF, WHOLE, problems, uniform


def started(problem: Problem, seed: int = 0) -> State | None:
    """A state at the floor, where it can be represented."""
    floor = serial_orders(problem)
    merged = merge(table_of(problem), simulate(problem, floor)) if floor else None
    return state_of(table_of(problem), merged, seed) if merged else None


def check_times(state: State) -> None:
    """Sweep what is kept from scratch, forwards and backwards, and compare."""
    table, merged = state.table, copied(state.kept)
    times, latest = empty_times(table), empty_latest(table)
    times.marks[0] = state.kept_times.marks[0]
    everything = np.array([[0] * len(table.first), [len(merged.ops)] * len(table.first)])
    assert sweep(table, merged, times, times, 0, latest, 0.0, everything)[1] == MARKS + 1
    start_us = np.zeros(table.devices)
    assert value_us(table, times, start_us) == pytest.approx((state.numbers[VALUE], state.numbers[MEAN_SPAN]))
    set_deadlines(table, latest, start_us, state.numbers[VALUE])
    latest_starts(table, merged, times, latest, MARKS + 1, NONE)
    there = merged.place >= 0
    assert (state.kept_times.end_us[there] == times.end_us[there]).all()
    assert (state.times.end_us[there] == times.end_us[there]).all()
    assert (state.latest.start_us[there] == latest.start_us[there]).all()
    assert (state.tried.place == merged.place).all()


CASES = {
    "makespan": uniform(4, 8, budget=8),
    "device_span": uniform(4, 8, budget=8, objective="device_span", v_shape=True),
    "device_span, linear": uniform(6, 24, budget=10, objective="device_span"),
    "offload": uniform(4, 8, budget=5, offload=HALF),
    "shared": uniform(4, 8, budget=5, offload=WHOLE, copy_channels={"duplex": False, "shared_by": [[0, 1], [2, 3]]}),
}


@pytest.mark.parametrize("problem", CASES.values(), ids=CASES.keys())
def test_kept_times_are_those_of_a_sweep_from_scratch(problem: Problem) -> None:
    state = started(problem)
    assert state is not None
    for _ in range(20):
        anneal(state, 10.0, 10_000)
        check_times(state)


@given(problems(), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_values_and_budgets_are_those_of_the_orders(problem: Problem, seed: int) -> None:
    """Makespans are exact, spans at least what the simulator finds; memory is within the budgets under any timing."""
    state = started(problem, seed)
    if state is None:
        return
    anneal(state, 2.0, 5_000)
    orders = orders_of(problem, state.table, state.best)
    found_us = simulate(problem, orders).value_us
    if problem.objective == "makespan":
        assert found_us == pytest.approx(state.numbers[BEST], rel=1e-9)
    else:
        assert found_us <= state.numbers[BEST] * (1 + 1e-9)
    for device, streams in zip(problem.devices, orders.devices, strict=True):
        if device.memory_bytes is not None:
            peak = any_timing_peak_bytes(problem, tuple(streams.streams()), orders.waits)
            assert peak <= device.memory_bytes
