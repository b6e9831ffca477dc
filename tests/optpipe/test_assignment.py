"""Unequal microbatches in the places of a schedule: predicted as simulated, and best where all can be tried."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from random import Random

import numpy as np
import pytest

from instances.schedules import one_f_one_b, v_wave
from optpipe.assignment import Places, likely_orders
from optpipe.compile import compile_schedule
from optpipe.compile.memory import memory_steps
from optpipe.problem import Floats, Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.stage import UnitFactors
from solver.build import build_schedule
from solver.solve import solve
from tests.optpipe.test_spread import vocabulary
from tests.unequal import factor_rows, times, unequal
from tests.unequal_schedules import with_factors

OFFLOADING = {
    "linear": one_f_one_b(3, 4, moved=[(0, 0), (0, 2), (1, 1)]),
    "V": v_wave(2, 4, moved=[(0, 0), (1, 3), (2, 2)]),
    "spread passes": solve(Problem.from_data(vocabulary(3, 4, lag_us=1)), "vocab-2"),
}


def drawn(rng: Random, microbatches: int) -> Floats:
    """Factors of each kind, in quarters: exact in every arithmetic. Those of passes, which few have, are the last."""
    names = sorted(UnitFactors._fields, key=lambda name: name == "time")
    rows = {name: [rng.randint(1, 12) / 4 for _ in range(microbatches)] for name in names}
    return np.array([rows[name] for name in UnitFactors._fields])


def in_places(schedule: Schedule, factors: Floats, places: Sequence[int]) -> Schedule:
    """The schedule in which each place has the factors of the microbatch that runs there."""
    entries = [dict(zip(UnitFactors._fields, column, strict=True)) for column in factors.T.tolist()]
    return with_factors(schedule, [entries[i] for i in places])


@pytest.mark.parametrize("objective", ["makespan", "device_span"])
@pytest.mark.parametrize("name", OFFLOADING)
def test_values_are_those_of_the_simulator(name: str, objective: str) -> None:
    """For device_span the simulator delays the first op of each device, so its value is no more."""
    schedule, rng = OFFLOADING[name], Random(0)
    data = schedule.problem.to_data() | {"transfer_us": 2, "objective": objective}
    schedule = build_schedule(Problem.from_data(data), schedule.orders, 0.0, "test", 0.0)
    places = Places(schedule.problem, schedule.orders)
    for _ in range(20):
        factors, order = drawn(rng, 4), rng.sample(range(4), 4)
        value = simulate((own := in_places(schedule, factors, order)).problem, own.orders).value_us
        found = places.value_us(factors, order)
        assert found == value if objective == "makespan" else found >= value


@pytest.mark.parametrize("seed", range(3))
def test_small_assignments_are_the_best_of_all(seed: int) -> None:
    schedule, rng = one_f_one_b(3, 6), Random(seed)
    factors, places = drawn(rng, 6), Places(schedule.problem, schedule.orders)
    found = places.assign(factors)
    assert sorted(found) == list(range(6))
    best = min(places.value_us(factors, order) for order in permutations(range(6)))
    assert places.value_us(factors, found) == best


def test_eight_microbatches_under_1f1b_are_put_in_the_best_order() -> None:
    """[1, 2, 3, 4, 1, 2, 3, 4] takes 106 as given and 82 in the best order."""
    problem = unequal(4, 8, backward_weight_us=1)
    schedule = solve(problem, "1f1b")
    factors, places = factor_rows([1, 2, 3, 4, 1, 2, 3, 4]), Places(schedule.problem, schedule.orders)
    assert places.value_us(factors, range(8)) == 106
    assert places.value_us(factors, places.assign(factors)) == 82


def test_a_schedule_in_an_order_of_its_own_keeps_it_for_the_sizes_that_it_was_made_for() -> None:
    """Its own factors come back: each microbatch is in its place, or in that of an equal one."""
    problem = unequal(3, 4, microbatch_factors=times(3, 1, 2, 1), microbatch_order="free")
    schedule = solve(problem, "1f1b")
    factors = factor_rows([3, 1, 2, 1])
    places = Places(schedule.problem, schedule.orders)
    assert places.value_us(factors, range(4)) == schedule.value_us
    assert places.value_us(factors, places.assign(factors)) <= schedule.value_us


def test_sizes_in_the_proportions_of_the_planned_ones_keep_the_planned_order() -> None:
    """It is better than all likely orders, and found without a change of one."""
    planned = [2, 5, 1, 4, 1, 3]
    entries = [{"time": time} for time in planned]
    given = with_factors(solve(unequal(3, 6), "1f1b"), entries)
    costs = factor_rows(planned)
    best = min(permutations(range(6)), key=lambda order: Places(given.problem, given.orders).value_us(costs, order))
    schedule = with_factors(given, entries, list(best))
    places, longer = Places(schedule.problem, schedule.orders), factor_rows([2 * time for time in planned])
    assert places.value_us(longer, places.assign(longer, changes=0)) == 2 * schedule.value_us
    assert min(places.value_us(longer, order) for order in likely_orders(planned).values()) > 2 * schedule.value_us


def test_orders_beyond_the_budget_are_left_where_one_fits() -> None:
    """Device 0 of 1F1B holds two activations of 4 bytes at once; the two large ones may not be neighbours."""
    problem = unequal(2, 4, budget=12, backward_weight_bytes=0)
    schedule = solve(problem, "1f1b")
    places = Places(problem, schedule.orders, memory_steps(compile_schedule(schedule), problem))
    factors = factor_rows([1] * 4, [2, 2, 1, 1])  # large, but no longer than the others
    assert places.excess_bytes(factors, range(4)) == 4
    found = places.assign(factors)
    assert places.excess_bytes(factors, found) == 0
    program = compile_schedule(in_places(schedule, factors, found))  # which checks the budget by itself
    assert program.microbatches == 4
    none = factor_rows([2] * 4, [2] * 4)
    assert places.excess_bytes(none, places.assign(none)) == 4


def test_likely_orders_hold_each_microbatch_once() -> None:
    assert all(sorted(order) == list(range(7)) for order in likely_orders([3, 1, 2, 3, 1, 5, 9]).values())
