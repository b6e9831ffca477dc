"""The local search: never worse than its start, known optima, the same answer for the same seed and work."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import HALF, WHOLE, uniform
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.worst_case_memory import worst_case_peak_bytes
from solver.build import build_schedule, over_budget, peak_budgets, within_budgets
from solver.limits import Limits
from solver.search.annealing.kernel import empty_latest, empty_times, latest_starts, set_deadlines, sweep, value_us
from solver.search.annealing.search import BEST, MEAN_SPAN, VALUE, State, anneal, build_state, local_search
from solver.search.annealing.sequence import copied, merge, orders_from_sequences
from solver.search.annealing.table import MARKS, NONE, build_table
from solver.serial import serial_orders
from solver.solution import Solution
from tests.optpipe.test_blocks import random_blocks, random_problem
from tests.problems import KNOWN_OPTIMA, problems
from tests.sample import examples
from tests.solver.published.test_dualpipe_v import v_blocks


def start_at(problem: Problem, orders: Orders | None) -> Solution:
    value = simulate(problem, orders).value_us if orders else float("inf")
    return Solution(orders, value, 0.0)


def search(problem: Problem, work: float, seed: int = 0, bound_us: float = 0.0) -> tuple[Solution, list[Solution]]:
    """The answer and what was reported before; a search that meets the bound is over."""
    reported: list[Solution] = []
    start = replace(start_at(problem, serial_orders(problem)), bound_us=bound_us)
    answer = local_search(problem, Limits(deterministic_limit=work, seed=seed), start, reported.append)
    return answer, reported


@given(problems())
@settings(max_examples=examples(40))
def test_every_reported_answer_is_better_within_budgets_and_worth_what_it_says(problem: Problem) -> None:
    answer, reported = search(problem, 0.02)
    values = [start_at(problem, serial_orders(problem)).value_us, *(better.value_us for better in reported)]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == len(values)
    for better in reported:
        assert better.orders is not None
        simulation = simulate(problem, better.orders)
        assert simulation.value_us == better.value_us
        assert within_budgets(problem, better.orders, simulation)
    assert answer.value_us == values[-1]


@pytest.mark.parametrize("name", ["makespan", "device_span"])
def test_known_optima_are_found_from_the_floor(name: str) -> None:
    problem, optimum = KNOWN_OPTIMA[name]
    assert search(problem, 1.0, bound_us=optimum)[0].value_us == optimum


def test_one_seed_and_one_amount_of_work_give_one_answer() -> None:
    problem = uniform(4, 12, budget=6)
    first, again = (search(problem, 0.1, seed=7)[1] for _ in range(2))
    assert [answer.value_us for answer in first] == [answer.value_us for answer in again]
    assert [answer.orders for answer in first] == [answer.orders for answer in again]


def test_without_any_schedule_the_floor_is_where_it_begins() -> None:
    problem = uniform(2, 4, budget=4)
    limits = Limits(deterministic_limit=0.1)
    answer = local_search(problem, limits, Solution(), lambda better: None)
    assert answer.orders is not None
    assert answer.value_us < start_at(problem, serial_orders(problem)).value_us


def test_a_cancelled_search_returns_its_start() -> None:
    problem = uniform(4, 8, budget=8)
    limits = Limits(time_limit_s=600)
    limits.cancel.request()
    start = start_at(problem, serial_orders(problem))
    reported: list[Solution] = []
    answer = local_search(problem, limits, start, reported.append)
    assert answer == start
    assert not reported


def test_it_stops_at_the_gap() -> None:
    problem, optimum = KNOWN_OPTIMA["makespan"]
    start = start_at(problem, serial_orders(problem))
    at_optimum = Solution(start.orders, start.value_us, optimum)
    assert local_search(problem, Limits(time_limit_s=600), at_optimum, lambda better: None).value_us == optimum


def started(problem: Problem, seed: int = 0) -> State | None:
    """A state at the floor, where it can be represented."""
    floor = serial_orders(problem)
    merged = merge(build_table(problem), simulate(problem, floor)) if floor else None
    return build_state(build_table(problem), merged, seed) if merged else None


def check_times(state: State) -> None:
    """Sweep what is kept from scratch, forwards and backwards, and compare."""
    table, merged = state.table, copied(state.kept)
    times, latest = empty_times(table), empty_latest(table)
    times.marks[0] = state.kept_times.marks[0]
    everything = np.array([[0] * len(table.first), [len(merged.ops)] * len(table.first)])
    assert sweep(table, merged, times, times, 0, latest, 0.0, everything)[1] == MARKS + 1
    start_us = np.zeros(table.devices)
    assert value_us(table, merged, times, start_us) == pytest.approx((state.numbers[VALUE], state.numbers[MEAN_SPAN]))
    set_deadlines(table, latest, start_us, state.numbers[VALUE])
    latest_starts(table, merged, times, latest, MARKS + 1, NONE)
    there = merged.place >= 0
    assert (state.kept_times.end_us[there] == times.end_us[there]).all()
    assert (state.times.end_us[there] == times.end_us[there]).all()
    assert (state.latest.start_us[there] == latest.start_us[there]).all()
    assert (state.tried.place == merged.place).all()


def annealed(problem: Problem, orders: Orders, seed: int) -> tuple[Schedule, State]:
    """The best schedule after some annealing, verified with its budgets, and the state; kept times are checked."""
    table = build_table(problem)
    state = build_state(table, merge(table, simulate(problem, orders)), seed)
    assert state is not None
    for _ in range(3):
        anneal(state, 2.0, 3_000)
        check_times(state)
    best = orders_from_sequences(problem, table, state.best)
    return build_schedule(problem, best, 0.0, "search", 0.0), state


CASES = {
    "makespan": uniform(4, 8, budget=8),
    "device_span": uniform(4, 8, budget=8, objective="device_span", v_shape=True),
    "device_span, linear": uniform(6, 24, budget=10, objective="device_span"),
    "offload": uniform(4, 8, budget=5, offload=HALF),
    "blocks": v_blocks(3, 6, 2.4, (1, 1, 1), devices=[{"memory_bytes": 7}] * 3),
    "shared": uniform(4, 8, budget=5, offload=WHOLE, copy_channels={"duplex": False, "shared_by": [[0, 1], [2, 3]]}),
}


@pytest.mark.parametrize("problem", CASES.values(), ids=CASES.keys())
def test_kept_times_are_those_of_a_sweep_from_scratch(problem: Problem) -> None:
    state = started(problem)
    assert state is not None
    for _ in range(20):
        anneal(state, 10.0, 10_000)
        check_times(state)


@given(st.integers(0, 10**6))
@settings(max_examples=examples(40))
def test_blocks_are_timed_and_take_memory_as_in_the_orders(seed: int) -> None:
    rng = Random(seed)
    problem = Problem.from_data(random_problem(rng))
    orders = random_blocks(problem, rng)
    budgets = [{"memory_bytes": size + rng.randrange(3)} for size in peak_budgets(problem, orders)]
    problem = Problem.from_data(problem.to_data() | {"devices": budgets})
    table = build_table(problem)
    state = build_state(table, merge(table, simulate(problem, orders)), seed)
    if state is None:  # a split backward may need more than a whole one
        return
    anneal(state, 2.0, 3_000)
    check_times(state)
    best = orders_from_sequences(problem, table, state.best)
    assert not over_budget(problem, best)
    if problem.objective == "makespan" and not any(stage.offload for stage in problem.stages):
        assert simulate(problem, best).value_us == pytest.approx(state.numbers[BEST], rel=1e-9)
    assert simulate(problem, best).value_us <= state.numbers[BEST] * (1 + 1e-9)


@given(problems(), st.integers(0, 100))
@settings(max_examples=examples(60))
def test_values_and_budgets_are_those_of_the_orders(problem: Problem, seed: int) -> None:
    """Makespans are exact, spans at least what the simulator finds; memory is within the budgets under any timing."""
    state = started(problem, seed)
    if state is None:
        return
    anneal(state, 2.0, 5_000)
    orders = orders_from_sequences(problem, state.table, state.best)
    found_us = simulate(problem, orders).value_us
    if problem.objective == "makespan":
        assert found_us == pytest.approx(state.numbers[BEST], rel=1e-9)
    else:
        assert found_us <= state.numbers[BEST] * (1 + 1e-9)
    for device, streams in zip(problem.devices, orders.devices, strict=True):
        if device.memory_bytes is not None:
            peak = worst_case_peak_bytes(problem, tuple(streams.streams()), orders.waits)
            assert peak <= device.memory_bytes
