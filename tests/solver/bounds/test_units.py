"""Bounds on slices and unequal microbatches: never above an optimum, whatever the order, and reached on known ones."""

from __future__ import annotations

from itertools import combinations, product
from random import Random

import numpy as np
import pytest

from instances import REFERENCE, instance
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.bounds.device import Knapsack, most_held_us
from solver.bounds.lower_bound import lower_bounds_us
from solver.bounds.unit_costs import UnitCosts
from solver.bounds.unit_order import ordered_bounds_us, preemptive_us
from solver.bounds.units import ByteTime
from solver.bounds.warmup_cooldown import Windows, prefix_hull
from solver.build import peak_budgets
from solver.exact.cp_sat.model import Options, solve_cp_sat
from solver.limits import Limits
from solver.solution import Solution
from tests.sample import some
from tests.solver.exact.cp_sat.test_units import CAUSAL, FAMILIES, schedules
from tests.unequal import random_orders, random_pipeline, random_unequal, times, unequal


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "slices of two devices"])
def test_no_schedule_at_all_is_below(name: str) -> None:
    devices, microbatches, fields = FAMILIES[name]
    values = schedules(unequal(devices, microbatches, **fields))
    for budget in sorted({max(peaks) for peaks in values}):
        optimum_us = min(value for peaks, value in values.items() if max(peaks) <= budget)
        for bound_us in lower_bounds_us(unequal(devices, microbatches, budget, **fields)).values():
            assert bound_us <= optimum_us * (1 + 1e-12), budget


def within_own_peaks(problem: Problem, rng: Random, tries: int) -> tuple[Problem, Solution]:
    """The problem with the budgets that the tightest of some random orders need, and these orders."""
    candidates = [random_orders(problem, rng)[0] for _ in range(tries)]
    orders, budgets = min(
        ((orders, peak_budgets(problem, orders)) for orders in candidates), key=lambda both: sum(both[1])
    )
    tight = problem.from_data(problem.to_data() | {"devices": [{"memory_bytes": budget} for budget in budgets]})
    return tight, Solution(orders, simulate(tight, orders).value_us, 0.0)


@pytest.mark.parametrize("first", some(range(0, 100, 10)))
def test_random_schedules_with_modes_and_copies_are_not_below(first: int) -> None:
    for seed in range(first, first + 10):
        rng = Random(seed)
        problem, start = within_own_peaks(Problem.from_data(random_unequal(rng)), rng, 3)
        assert lower_bound_us(problem) <= start.value_us * (1 + 1e-12), seed


@pytest.mark.parametrize("first", some(range(0, 40, 5)))
def test_the_best_schedules_found_are_not_below(first: int) -> None:
    """Small pipelines of every kind: most of these bounds are optima, so a bound that is too high is seen."""
    met = 0
    for seed in range(first, first + 5):
        rng = Random(seed)
        problem, start = within_own_peaks(random_pipeline(rng), rng, 6)
        limits = Limits(workers=1, deterministic_limit=0.1)
        best = solve_cp_sat(problem, limits, start, lambda _: None, Options(climb=False))
        bound_us = lower_bound_us(problem)
        assert bound_us <= best.value_us * (1 + 1e-12), seed
        met += bound_us == pytest.approx(best.value_us, rel=1e-12)
    assert met >= 2


@pytest.mark.parametrize("name", [f"q-p4-m4-n4-{own}" for own in ("causal-b20", "causal-b32", "fused-b5", "fused-b10")])
def test_is_the_optimum_of_causal_slices(name: str) -> None:
    """Half of a microbatch more than one takes 2205, proved without any search."""
    assert lower_bound_us(instance(name)) == REFERENCE[name]["proved_optimum_us"]


@pytest.mark.parametrize(("objective", "budget"), some([*product(["makespan", "device_span"], [8, 12])]))
def test_a_free_order_is_bounded_by_the_best_of_all_orders(objective: str, budget: int) -> None:
    fields = {"objective": objective, "split_backward": False}
    costs = [1, 3, 1, 2]
    free = unequal(2, 4, budget, microbatch_factors=times(*costs), microbatch_order="free", **fields)
    limits = Limits(workers=1, deterministic_limit=1)
    best_us = min(
        solve_cp_sat(
            unequal(2, 4, budget, microbatch_factors=times(*order), **fields), limits, Solution(), print
        ).value_us
        for order in ([1, 1, 2, 3], [1, 3, 2, 1], [1, 2, 3, 1], [3, 2, 1, 1])
    )
    assert max(lower_bounds_us(free).values()) <= best_us


def test_known_windows_of_unequal_microbatches() -> None:
    """Two devices of F 1 and BW 2, room for two: the first idles from its two F to the first gradient."""
    problem = unequal(2, 4, 8, microbatch_factors=times(3, 1, 1, 2), split_backward=False)
    device = Windows(UnitCosts.of(problem), [0])
    assert device._warm_up_idle_us == (3 + 3 + 6) - (3 + 1)
    # The last two are in flight when F of the last starts: one backward of 2 in a window of F and BW of 2 each.
    assert device._cool_down(3) == ((2 + 4) - 2, 0, (2 + 4) - 2)


def test_memory_orders_slices_by_their_own_sizes() -> None:
    """F of a slice waits for as many backwards as free its bytes, and those come last slice first."""
    problem = unequal(1, 3, 5, slices={"count": 2, "factors": {"bytes": [0.25, 0.75]}})
    costs = UnitCosts.of(problem)
    assert costs.whole.tolist() == [[1, 3] * 3]
    (bound_us,) = ordered_bounds_us(costs)
    assert bound_us == max(problem.work_us)
    assert (
        ordered_bounds_us(UnitCosts.of(unequal(1, 3, 3, slices={"count": 2, "factors": {"bytes": [0.25, 0.75]}}))) == []
    )


def test_the_preemptive_schedule_is_the_largest_set() -> None:
    """Jackson's schedule ends when some set of ops has waited for its least head, run, and let its least tail pass."""
    rng = Random(5)
    for _ in range(200):
        ops = [(rng.randint(0, 9), rng.randint(0, 5), rng.randint(0, 9)) for _ in range(rng.randint(1, 6))]
        sets = [some for size in range(1, len(ops) + 1) for some in combinations(ops, size)]
        least = max(min(op[0] for op in some) + sum(op[1] for op in some) + min(op[2] for op in some) for some in sets)
        assert preemptive_us([(float(a), float(b), float(c)) for a, b, c in ops]) == least


def test_knapsacks_hold_at_least_what_whole_units_do() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        count, room = int(rng.integers(1, 6)), float(rng.integers(0, 12))
        full_us, rest_us, whole, rest = rng.integers(0, 6, (4, count)).astype(float)
        full_us += rest_us
        pieces = Knapsack(full_us, whole)
        most_us = most_held_us(full_us, rest_us, whole, rest, room)
        for states in product(range(3), repeat=count):
            size = sum((0.0, rest[k], whole[k])[state] for k, state in enumerate(states))
            time_us = sum((0.0, rest_us[k], full_us[k])[state] for k, state in enumerate(states))
            if size <= room:
                assert time_us <= most_us + 1e-9
                if 1 not in states:
                    assert time_us <= float(pieces.most_us(room)) + 1e-9
        prefixes = Knapsack(*prefix_hull(full_us, whole))
        for size, time_us in zip(np.cumsum(whole), np.cumsum(full_us), strict=True):
            assert time_us <= float(prefixes.most_us(size)) + 1e-9


def test_gradients_of_keys_and_values_take_byte_time() -> None:
    """The last of two slices takes 2 bytes for the first; its backward takes 4 us, that of the first 3 more."""
    fields = {"slices": CAUSAL, "split_backward": False}
    bare, beside = (unequal(1, 4, 10, slice_gradient_bytes=size, **fields) for size in (0, 2))
    needed = [ByteTime(UnitCosts.of(problem), [0])._needed_byte_us for problem in (bare, beside)]
    assert needed[1] - needed[0] == 4 * 2 * ((3 + 1) + (2 + 1))
