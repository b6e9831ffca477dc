"""Windows decide on activation modes: what they answer keeps every rule, and reaches what CP-SAT proves."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import build_schedule, peak_budgets, within_budgets
from solver.exact.ticks import TimeGrid
from solver.limits import Limits
from solver.search.lns.model import WindowModel
from solver.search.lns.neighbourhood import Numbering, Surroundings, choose_window, with_split_backwards
from solver.search.lns.search import lns_search
from solver.serial import serial_orders
from solver.solution import Solution
from solver.solve import solve
from tests.recomputing import FULL, LEAVES, random_recomputing, recomputing
from tests.sample import examples


def tight(seed: int) -> tuple[Problem, Orders]:
    """A random problem with a little more memory than its random orders, with split backwards, need."""
    rng = Random(seed)
    problem, orders = random_recomputing(rng, split_backward=True)
    orders = with_split_backwards(problem, orders)
    budgets = [{"memory_bytes": size + rng.randrange(3)} for size in peak_budgets(problem, orders)]
    return problem.from_data(problem.to_data() | {"devices": budgets}), orders


def check_windows(problem: Problem, orders: Orders, seed: int) -> None:
    """Windows of some sizes have the schedule at hand as a point, and their solutions keep every rule and budget."""
    numbering = Numbering(problem, TimeGrid.of(problem, simulate(problem, orders).value_us))
    around = Surroundings.of(numbering, orders)
    random = np.random.default_rng(seed)
    for size in (3, 8, 20):
        model = WindowModel(around, choose_window(around, random, size))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.fix_variables_to_their_hinted_value = True
        assert solver.solve(model.model) == cp_model.OPTIMAL, "the schedule at hand is a point of the model"
        solver.parameters.fix_variables_to_their_hinted_value = False
        solver.parameters.max_deterministic_time = 0.5
        assert solver.solve(model.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        found = model.orders(solver)
        if found is not None:
            simulation = simulate(problem, found)  # which checks that all ops are there, in order, and of their modes
            assert within_budgets(problem, found, simulation)


@given(st.integers(0, 10_000))
@settings(max_examples=examples(40))
def test_a_window_has_the_schedule_at_hand_and_its_solutions_keep_every_rule(seed: int) -> None:
    check_windows(*tight(seed), seed)


FAMILIES = {
    "ahead": recomputing(3, 4, [{"name": "whole", "kept_bytes": 1, "recompute_us": 1}], 20),
    "inside": recomputing(2, 3, [{**FULL, "segment_bytes": 3}], 15, backward_weight_bytes=2),
    "copies": recomputing(2, 4, [FULL, LEAVES], 18),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_windows_reach_what_cp_sat_proves(name: str) -> None:
    problem = FAMILIES[name]
    optimum = solve(problem, "cp-sat", Limits(120, workers=1))
    assert optimum.status == "optimal"
    floor = serial_orders(problem)
    assert floor is not None
    start = Solution(with_split_backwards(problem, floor), simulate(problem, floor).value_us, optimum.value_us)
    answer = lns_search(problem, Limits(deterministic_limit=2.0, workers=1), start, lambda _: None)
    assert answer.orders is not None
    assert build_schedule(problem, answer.orders, 0.0, "windows", 0.0).value_us == optimum.value_us
