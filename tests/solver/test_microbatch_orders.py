"""Orders of unequal microbatches to begin with."""

from __future__ import annotations

from random import Random

import pytest

from instances import instance
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import build_schedule
from solver.limits import Limits
from solver.methods import METHODS
from solver.microbatch_orders import cycles, in_order, likely_orders, with_equals_ascending, with_own_numbers
from solver.solution import OnSolution, Solution
from solver.solve import solve
from solver.strategy import SharedIncumbent, TimeSlice, run_subsolvers, with_trials
from solver.warm_starts import offer_published
from tests.unequal import times, unequal

EIGHT = (1, 2, 3, 4, 1, 2, 3, 4)


def test_likely_orders_hold_each_microbatch_once_and_differ() -> None:
    problem = unequal(2, 8, microbatch_factors=times(*EIGHT), microbatch_order="free")
    orders = dict(likely_orders(problem))
    assert orders["ascending"] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert [EIGHT[i] for i in orders["rising and falling"]] == [1, 2, 3, 4, 4, 3, 2, 1]
    assert [EIGHT[i] for i in orders["clusters (1, 2, 0)"]] == [3, 3, 4, 4, 1, 2, 1, 2]
    assert all(sorted(order) == list(range(8)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()} | {tuple(range(8))}) == len(orders) + 1


@pytest.mark.parametrize("slices", [None, {"count": 2, "factors": {"forward": [1, 2]}}])
def test_orders_with_their_own_numbers_are_as_long(slices: dict[str, object] | None) -> None:
    """The same ops at the same times, called by the numbers that microbatches have in the problem."""
    rng, method = Random(0), "1f1b" if slices is None else "seq1f1b"
    offload = {"bytes": 4, "offload_us": 1, "reload_us": 1}
    problem = unequal(
        3, 5, microbatch_factors=times(1, 3, 2, 5, 1), microbatch_order="free", slices=slices, offload=offload
    )
    for _ in range(5):
        order = list(range(5))
        rng.shuffle(order)
        permuted = in_order(problem, order)
        make = METHODS[method].orders
        assert make is not None
        made = make(permuted)
        own = with_own_numbers(problem, made, order)
        assert simulate(problem, own).value_us == simulate(permuted, made).value_us
        assert build_schedule(problem, own, 0.0, "test", 0.0).microbatch_order == order


def test_offloads_and_their_waits_are_renamed() -> None:
    offload = {"bytes": 4, "offload_us": 1, "reload_us": 1}
    problem = unequal(
        2, 4, 4, microbatch_factors=times(1, 3, 2, 1), microbatch_order="free", offload=offload, backward_weight_bytes=0
    )
    order = [3, 1, 0, 2]
    made = METHODS["ada-offload"].orders
    assert made is not None
    own = with_own_numbers(problem, made(in_order(problem, order)), order)
    build_schedule(problem, own, 0.0, "test", 0.0)  # which verifies it, within the budgets


def test_equal_microbatches_change_names_so_that_the_first_runs_first() -> None:
    problem = unequal(
        2, 4, microbatch_factors=times(1, 3, 1, 1), microbatch_order="free", slices={"count": 2, "factors": {}}
    )
    made = METHODS["seq1f1b"].orders
    assert made is not None
    orders = with_own_numbers(problem, made(in_order(problem, [3, 1, 2, 0])), [3, 1, 2, 0])
    ascending = with_equals_ascending(problem, orders)
    assert ascending.microbatch_order == [0, 1, 2, 3]
    assert simulate(problem, ascending).value_us == simulate(problem, orders).value_us


def test_the_best_fixed_order_of_1f1b_is_among_the_starts() -> None:
    """Costs 1 to 4 twice, in the memory of 1F1B: 106 as given, 82 rising and falling, which CP-SAT proves."""
    problem = instance("u-p4-m8-b4")
    assert solve(problem, "1f1b").value_us == 106
    shared = SharedIncumbent(problem, Limits(60), None)
    offer_published(problem, shared)
    assert shared.best.value_us == 82
    assert shared.best.orders is not None
    assert [EIGHT[i] for i in shared.best.orders.microbatch_order or ()] == [1, 2, 3, 4, 4, 3, 2, 1]


def test_a_search_begins_with_the_best_start_of_each_of_a_few_orders() -> None:
    """From the best of all starts alone annealing ends 7 % above what it reaches from another on u-p8-m32-lognormal."""
    problem = instance("u-p4-m16-bimodal")
    shared = SharedIncumbent(problem, Limits(60, deterministic_limit=1), None)
    offer_published(problem, shared)
    begun = []

    def search(_problem: Problem, _limits: Limits, start: Solution, _offer: OnSolution) -> Solution:
        begun.append(start)
        return start

    run_subsolvers(problem, shared, with_trials([[TimeSlice("search", search, 1.0, once=True)]]))
    *trials, last = begun
    assert len({tuple(start.orders.microbatch_order or ()) for start in trials if start.orders}) == len(trials) == 4
    assert [start.value_us for start in trials] == sorted(start.value_us for start in trials)
    assert trials[0].value_us == last.value_us == shared.best.value_us
    assert all(start.bound_us == shared.best.bound_us for start in begun)
    assert shared.ranked(1000) is None


def test_cycles_of_given_orders_repeat_at_least_once() -> None:
    def lengths(*factors: float, **fields: object) -> list[int]:
        problem = unequal(2, len(factors), microbatch_factors=times(*factors), **fields)
        return [cycle.length for cycle in cycles(problem)]

    assert lengths(2, 2, 2) == [1]
    assert lengths(1, 2, 3, 1, 2, 3, 1) == [3]
    assert lengths(1, 2, 3, 1, 2) == []
    assert lengths(*range(1, 18), *range(1, 18)) == [17]
    assert lengths(*range(1, 34), *range(1, 34)) == []
    assert lengths(*range(1, 18), *range(1, 18), slices={"count": 2}) == []
    assert [cycle.length for cycle in cycles(unequal(2, 1, slices={"count": 3}))] == [1]


def test_cycles_of_free_orders_hold_each_microbatch_once() -> None:
    problem = unequal(2, 9, microbatch_factors=times(1, 1, 1, 1, 1, 1, 2, 2, 2), microbatch_order="free")
    spread, ascending = cycles(problem)
    assert spread.length == ascending.length == 3
    assert spread.microbatch_order == [0, 6, 1, 2, 7, 3, 4, 8, 5]
    assert ascending.microbatch_order == [0, 1, 6, 2, 3, 7, 4, 5, 8]
    assert cycles(unequal(2, 3, microbatch_factors=times(1, 2, 2), microbatch_order="free")) == []
