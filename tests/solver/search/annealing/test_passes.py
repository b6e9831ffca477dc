"""The local search with spread passes: exact times across barriers, memory that passes keep, and known optima."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.errors import DeadlockError, OrderError
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.worst_case_memory import worst_case_peak_bytes
from solver.search.annealing.search import BEST, anneal, build_state
from solver.search.annealing.sequence import merge, orders_from_sequences
from solver.search.annealing.table import build_table
from solver.serial import serial_orders
from tests.optpipe.test_spread import random_problem, vocabulary
from tests.sample import examples
from tests.solver.search.annealing.test_search import annealed, check_times
from tests.solver.search.annealing.test_sequence import levels_bytes, split, with_own_levels

COPY = {"bytes": 1, "offload_us": 2, "reload_us": 1}


def random_case(seed: int) -> tuple[Problem, Orders]:
    """Passes beside offloads, modes, shared channels, a free order or none of these; orders of random neighbours."""
    rng = Random(seed)
    data = random_problem(rng).to_data() | {"objective": rng.choice(["makespan", "device_span"])}
    for stage in data["stages"]:
        if rng.random() < 0.3:
            stage["offload"] = COPY
        elif rng.random() < 0.2:
            stage["modes"] = [{"name": "full", "kept_bytes": 0, "recompute_us": 2}]
    if rng.random() < 0.3 and len(data["devices"]) > 1:
        data["copy_channels"] = {"shared_by": [[0, 1]]}
    if "microbatch_factors" in data and rng.random() < 0.5:
        data["microbatch_order"] = "free"
    problem = Problem.from_data(data)
    orders = serial_orders(problem)
    assert orders is not None
    lists = [[*device.compute] for device in orders.devices]
    for _ in range(20):
        ops = lists[rng.randrange(len(lists))]
        if len(ops) > 1:
            k = rng.randrange(len(ops) - 1)
            ops[k : k + 2] = ops[k + 1], ops[k]
            try:
                simulate(problem, Orders.of_compute(lists))
            except (DeadlockError, OrderError):
                ops[k : k + 2] = ops[k + 1], ops[k]
    return problem, Orders.of_compute(lists)


@given(st.integers(0, 10**6))
@settings(max_examples=examples(100))
def test_sequences_of_any_orders_are_orders_again(seed: int) -> None:
    problem, orders = random_case(seed)
    table = build_table(problem)
    merged = merge(table, simulate(problem, orders))
    again = orders_from_sequences(problem, table, merged)
    assert split(again) == split(orders)
    simulate(problem, again)
    for device, level in zip(again.devices, levels_bytes(problem, table, merged), strict=True):
        assert worst_case_peak_bytes(problem, tuple(device.streams()), again.waits, again.modes) <= level


@given(st.integers(0, 10**6))
@settings(max_examples=examples(100))
def test_values_and_budgets_are_those_of_the_orders(seed: int) -> None:
    """Kept times are those of a sweep from scratch; the best is worth what the kernel says and keeps every rule."""
    problem, orders = random_case(seed)
    problem = with_own_levels(problem, orders)
    schedule, state = annealed(problem, orders, seed)
    if problem.objective == "makespan":
        assert schedule.value_us == pytest.approx(state.numbers[BEST], rel=1e-9)
    else:
        assert schedule.value_us <= state.numbers[BEST] * (1 + 1e-9)


@pytest.mark.parametrize("objective", ["makespan", "device_span"])
@pytest.mark.parametrize("barriers", [1, 2])
def test_kept_times_are_those_of_a_sweep_from_scratch(barriers: int, objective: str) -> None:
    data = vocabulary(4, 12, barriers=barriers, lag_us=1) | {"objective": objective}
    data["spread"][0]["kept_bytes"] = [1] * 4
    data["devices"] = [{"memory_bytes": 2 * (4 - d + barriers) + 2} for d in range(4)]
    problem = Problem.from_data(data)
    table = build_table(problem)
    floor = serial_orders(problem)
    assert floor is not None
    state = build_state(table, merge(table, simulate(problem, floor)), 0)
    assert state is not None
    for _ in range(20):
        anneal(state, 10.0, 10_000)
        check_times(state)
    assert state.numbers[BEST] < simulate(problem, floor).value_us
