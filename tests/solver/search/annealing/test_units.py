"""The local search on slices, unequal microbatches and free orders: valid sequences, exact values, known optima."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.errors import MethodError
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.worst_case_memory import worst_case_peak_bytes
from solver.build import build_schedule
from solver.limits import Limits
from solver.scale import refuse_too_many_costs
from solver.search.annealing.search import BEST, anneal, build_state, local_search
from solver.search.annealing.sequence import merge, orders_from_sequences
from solver.search.annealing.table import build_table
from solver.serial import serial_orders
from solver.solution import Solution
from solver.solve import solve
from solver.strategy import auto_subsolvers
from tests.sample import examples, some
from tests.solutions import serial_start
from tests.solver.search.annealing.test_modes import split
from tests.solver.search.annealing.test_search import annealed
from tests.solver.search.annealing.test_sequence import levels_bytes, with_own_levels
from tests.unequal import random_orders, random_unequal, times, unequal


def random_case(seed: int) -> tuple[Problem, Orders]:
    rng = Random(seed)
    problem = Problem.from_data(random_unequal(rng))
    return problem, random_orders(problem, rng)[0]


@pytest.mark.parametrize("first", some(range(0, 80, 8)))
def test_sequences_of_orders_of_units_are_orders_again(first: int) -> None:
    """Ops, modes and the order of the microbatches stay; memory is within the level along the sequence."""
    for seed in range(first, first + 8):
        problem, orders = random_case(seed)
        table = build_table(problem)
        merged = merge(table, simulate(problem, orders))
        again = orders_from_sequences(problem, table, merged)
        simulate(problem, again)  # which checks that units are in order
        if again.microbatch_order is not None:
            entries = problem.microbatch_factors or []
            both = (again.microbatch_order, orders.microbatch_order or range(problem.microbatches))
            assert [entries[i] for i in both[0]] == [entries[i] for i in both[1]]
        if again.microbatch_order == orders.microbatch_order and all(s.split_backward for s in problem.stages):
            assert split(again) == split(orders)
            assert not problem.has_modes or (again.modes == orders.modes).all()
        for device, level in zip(again.devices, levels_bytes(problem, table, merged), strict=True):
            assert worst_case_peak_bytes(problem, tuple(device.streams()), again.waits, again.modes) <= level


def tight(seed: int) -> tuple[Problem, Orders]:
    """A random problem, and orders of it that need all of its budgets as sequences."""
    problem, orders = random_case(seed)
    return with_own_levels(problem, orders), orders


@given(st.integers(0, 10_000))
@settings(max_examples=examples(80))
def test_values_and_budgets_are_those_of_the_orders(seed: int) -> None:
    """Kept times are those of a sweep from scratch; the best is worth what the kernel says and keeps every rule."""
    problem, orders = tight(seed)
    schedule, state = annealed(problem, orders, seed)
    if problem.objective == "makespan":
        assert schedule.value_us == pytest.approx(state.numbers[BEST], rel=1e-9)
    else:
        assert schedule.value_us <= state.numbers[BEST] * (1 + 1e-9)


CAUSAL = {"count": 2, "factors": {"forward": [1, 2], "backward_input": [2, 3], "bytes": [1, 0.75]}}

FAMILIES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "slices": (2, 2, 16, {"slices": CAUSAL, "slice_gradient_bytes": 1}),
    "fused slices": (3, 2, 14, {"slices": CAUSAL, "slice_gradient_bytes": 2, "split_backward": False}),
    "given": (2, 4, 12, {"microbatch_factors": [{"time": 1, "bytes": 2}, {"time": 3}, {}, {"time": 2}]}),
    "free": (2, 4, 8, {"microbatch_factors": times(1, 3, 2, 1), "microbatch_order": "free"}),
    "free slices": (2, 3, 20, {"microbatch_factors": times(1, 3, 2), "microbatch_order": "free", "slices": CAUSAL}),
    "free span": (
        2,
        4,
        12,
        {"microbatch_factors": times(3, 1, 1, 2), "microbatch_order": "free", "objective": "device_span"},
    ),
    "copies": (
        2,
        3,
        8,
        {
            "microbatch_factors": times(1, 3, 2),
            "microbatch_order": "free",
            "offload": {"bytes": 2, "offload_us": 1, "reload_us": 1},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_optima_that_cp_sat_proves_are_found(name: str) -> None:
    devices, microbatches, budget, fields = FAMILIES[name]
    problem = unequal(devices, microbatches, budget, **fields)
    optimum = solve(problem, "cp-sat", Limits(120, workers=1))
    floor = serial_orders(problem)
    assert floor is not None
    start = Solution(floor, simulate(problem, floor).value_us, optimum.bound_us)  # where it ends
    found = local_search(problem, Limits(workers=1, deterministic_limit=2.0), start, lambda _: None)
    assert optimum.status == "optimal"
    assert found.value_us == optimum.value_us
    assert found.orders is not None
    build_schedule(problem, found.orders, optimum.bound_us, "search", 0.0)


@given(st.integers(0, 10_000))
@settings(max_examples=examples(8))
def test_no_answer_is_better_than_the_optimum(seed: int) -> None:
    problem, orders = tight(seed)
    optimum = solve(problem, "cp-sat", Limits(60, workers=1), starts=[orders])
    start = Solution(orders, simulate(problem, orders).value_us, 0.0)
    answer = local_search(problem, Limits(deterministic_limit=0.02, seed=seed), start, lambda _: None)
    assert answer.orders is not None
    assert optimum.bound_us * (1 - 1e-9) <= answer.value_us <= start.value_us


def test_one_seed_and_one_amount_of_work_give_one_answer() -> None:
    problem = unequal(4, 12, 24, microbatch_factors=times(*range(1, 13)), microbatch_order="free")

    def found() -> list[Solution]:
        reported: list[Solution] = []
        start = serial_start(problem)
        assert start is not None
        local_search(problem, Limits(deterministic_limit=0.1, seed=7), start, reported.append)
        return reported

    assert found() == found()


@pytest.mark.parametrize("objective", ["makespan", "device_span"])
def test_factors_of_one_change_nothing(objective: str) -> None:
    """The same moves and orders as without factors, even where those that are 1 are computed as factors."""
    alike = {"microbatch_factors": times(*[1] * 6), "microbatch_order": "free", "slices": {"count": 1}}
    offload = {"bytes": 2, "offload_us": 1, "reload_us": 1}
    plain = unequal(3, 6, 10, offload=offload, objective=objective)
    given_ones = unequal(3, 6, 10, offload=offload, objective=objective, **alike)
    answers = []
    for problem in (plain, given_ones):
        start = serial_start(problem)
        assert start is not None
        answers.append(local_search(problem, Limits(deterministic_limit=0.03), start, lambda _: None))
    assert answers[0] == answers[1]


def test_equal_microbatches_keep_the_order_of_their_numbers() -> None:
    """Microbatches of equal costs are alike: of all orders of them only one is a state of the search."""
    problem = unequal(2, 8, microbatch_factors=times(1, 2, 1, 2, 3, 1, 2, 1), microbatch_order="free")
    floor = serial_orders(problem)
    assert floor is not None
    table = build_table(problem)
    state = build_state(table, merge(table, simulate(problem, floor)), 0)
    assert state is not None
    anneal(state, 5.0, 100_000)
    order = orders_from_sequences(problem, table, state.kept).microbatch_order
    assert order is not None
    assert order != list(range(8))
    for numbers in ([0, 2, 5, 7], [1, 3, 6]):
        assert [i for i in order if i in numbers] == numbers


def test_more_different_costs_than_codes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers would exceed 31 bits; auto goes without annealing then."""
    factors = times(*(1 + n / 2048 for n in range(2048)))
    refuse_too_many_costs(unequal(85, 2048, microbatch_factors=factors))
    with pytest.raises(MethodError, match=r"2048 different units on 86 stages need 32.*Maybe round microbatch_factors"):
        refuse_too_many_costs(unequal(86, 2048, microbatch_factors=factors))
    few = unequal(2, 2)

    def methods() -> set[str]:
        return {search.method for concurrent in auto_subsolvers(few, 2) for search in concurrent}

    assert "search" in methods()
    monkeypatch.setattr("solver.scale.CODE_BITS", 4)
    assert "search" not in methods()
    with pytest.raises(MethodError, match="search numbers ops with 4 bits"):
        solve(few, "search")
