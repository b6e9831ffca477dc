"""Stages without a backward, for searches that know none: what methods find, and a backward that costs nothing."""

from __future__ import annotations

from random import Random

import pytest

from optpipe.errors import InfeasibleError, MethodError, NoSolutionError
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds.lower_bound import device_bounds_us, lower_bound_us
from solver.build import build_schedule
from solver.exact.cp_sat.model import solve_cp_sat
from solver.frozen import orders_with_backwards, orders_without_backwards, with_backwards
from solver.limits import Limits
from solver.methods import METHODS
from solver.serial import known_budgets_bytes
from solver.solution import Feed, Solution
from solver.solve import search
from tests.sample import some
from tests.solver.test_untrained_stages import WORK, random_frozen
from tests.unequal import random_orders, random_unequal


def random_case(seed: int) -> Problem:
    """Up to four stages anywhere, along a V or a loop, with modes, copies, factors and slices; all may be frozen."""
    rng = Random(seed)
    data = random_unequal(rng)
    devices, stages = range(len(data["devices"])), data["stages"]
    homes = (
        [*devices, *rng.choice([reversed(devices), devices])] if rng.random() < 0.5 else [s["device"] for s in stages]
    )
    frozen = rng.randint(1, len(homes))
    data["stages"] = [
        stages[s % len(stages)] | {"device": home, "backward": "none" if s < frozen else "full"}
        for s, home in enumerate(homes)
    ]
    return Problem.from_data(data | {"objective": rng.choice(["makespan", "device_span"])})


@pytest.mark.parametrize("seed", some(range(60)))
def test_a_backward_that_costs_nothing_leaves_the_makespan_as_it_is(seed: int) -> None:
    problem = random_case(seed)
    whole = with_backwards(problem)
    orders = orders_without_backwards(problem, random_orders(whole, Random(seed))[0])
    back = orders_with_backwards(problem, orders)
    build_schedule(whole, back, 0.0, "random", 0.0)  # verifies it
    found = build_schedule(problem, orders_without_backwards(problem, back), 0.0, "random", 0.0)
    simulation, simulated_back = simulate(problem, orders), simulate(whole, back)
    assert simulated_back.makespan_us == pytest.approx(simulation.makespan_us)
    assert found.value_us == pytest.approx(simulation.value_us)
    assert max(lower_bound_us(problem), *device_bounds_us(problem)) <= simulation.value_us + 1e-9


@pytest.mark.parametrize("seed", some(range(20)))
def test_every_method_keeps_the_rules_and_no_bound_is_above_a_value(seed: int) -> None:
    rng, free = Random(seed), random_case(seed)
    budgets = [{"memory_bytes": rng.choice([None, known, known + 8])} for known in known_budgets_bytes(free)]
    problem = Problem.from_data(free.to_data() | {"devices": budgets})
    values, bounds = {}, {"no search": lower_bound_us(problem)}
    for name in METHODS:
        try:
            found = search(problem, name, Limits(0.3, workers=1))
        except (MethodError, InfeasibleError, NoSolutionError):
            continue
        bounds[name] = found.bound_us
        if found.orders is not None:
            values[name] = build_schedule(problem, found.orders, found.bound_us, name, 0.0).value_us  # verifies it
            assert found.value_us == pytest.approx(values[name])
    assert values
    assert max(bounds.values()) <= min(values.values()) + 1e-6, (values, bounds)


@pytest.mark.parametrize("seed", some(range(20)))
def test_no_answer_is_worse_than_the_start_or_what_is_fed(seed: int) -> None:
    problem = random_frozen(seed).replaced(objective="makespan")
    best = solve_cp_sat(problem, WORK, Solution(None, float("inf"), 0.0), lambda _: None)
    assert best.orders is not None
    feed, limits = Feed(), Limits(0.2, workers=1)
    feed.offer(best)
    for found in (
        search(problem, "search", limits, starts=[best.orders]),
        search(problem, "search", limits, feed=feed),
    ):
        assert found.bound_us <= best.value_us + 1e-9
        assert found.value_us <= best.value_us + 1e-9
