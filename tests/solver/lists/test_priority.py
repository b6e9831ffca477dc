"""Priority lists: 1F1B where its memory is there, within budgets that no published schedule keeps, growth included."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest

from instances import instance
from optpipe.errors import MethodError
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.build import peak_budgets, within_budgets
from solver.limits import Limits
from solver.lists.priority import RULES, list_orders, rules_for
from solver.published.interleaved import interleaved_1f1b
from solver.published.one_stage import one_f_one_b
from solver.serial import serial_orders
from solver.strategy import SharedIncumbent
from solver.warm_starts import MOST_LISTED_OPS, offer_published, starts
from tests.sample import some
from tests.unequal import random_pipeline, times, unequal


def with_budgets(problem: Problem, budgets: list[int]) -> Problem:
    return Problem.from_data(problem.to_data() | {"devices": [{"memory_bytes": size} for size in budgets]})


@pytest.mark.parametrize("first", some(range(0, 60, 6)))
def test_any_placement_and_any_units_within_every_budget(first: int) -> None:
    made = 0
    for seed in range(first, first + 6):
        problem = random_pipeline(Random(seed))
        floor = serial_orders(problem)
        assert floor is not None
        tight = with_budgets(problem, [3 * size for size in peak_budgets(problem, floor)])
        for rule in rules_for(tight):
            with suppress(MethodError):
                orders = list_orders(tight, rule)
                assert within_budgets(tight, orders, simulate(tight, orders)), seed
                made += 1
    assert made


def test_1f1b_where_its_memory_is_there() -> None:
    problem = unequal(4, 8, split_backward=False)
    enough = with_budgets(problem, peak_budgets(problem, one_f_one_b(problem)))
    assert simulate(enough, list_orders(enough, RULES[0])).value_us == (8 + 3) * 3


def test_memory_that_grows_at_the_end_of_a_backward() -> None:
    """B leaves 6 bytes in place of 4: in 10, one microbatch's W goes before the next B."""
    problem = unequal(2, 4, 10, backward_weight_bytes=6)
    for rule in rules_for(problem):
        orders = list_orders(problem, rule)
        assert within_budgets(problem, orders, simulate(problem, orders))


def test_chunks_in_half_the_memory_of_interleaved_1f1b() -> None:
    """Figures of docs/math/search.md: the first list takes less than 1.6 times the bound, the floor twelve times."""
    data = instance("d-p16-m32-o1-mo1-b1o4-interleaved4-make").to_data()
    data["stages"] = [stage | {"split_backward": False, "offload": None} for stage in data["stages"]]
    data["devices"] = [{"memory_bytes": None}] * 16
    free = Problem.from_data(data)
    half = with_budgets(free, [size // 2 for size in peak_budgets(free, interleaved_1f1b(free))])
    orders = list_orders(half, RULES[0])
    assert within_budgets(half, orders, simulate(half, orders))
    floor = serial_orders(half)
    assert floor is not None
    assert simulate(half, orders).value_us < 1.6 * lower_bound_us(half)
    assert simulate(half, floor).value_us > 12 * lower_bound_us(half)


def test_they_are_offered_where_no_published_method_fits() -> None:
    problem = unequal(
        4, 6, 12, microbatch_factors=[{"time": f, "bytes": f} for f in (1, 2, 1, 2, 1, 2)], split_backward=False
    )
    shared = SharedIncumbent(problem, Limits(60), None)
    offer_published(problem, shared)
    assert shared.best.method == "priority-lists"
    assert shared.best.value_us < 3 * 4 * 9, "one microbatch at a time"


def test_too_many_ops_are_left_to_others() -> None:
    for microbatches, offered in ((8, True), (MOST_LISTED_OPS // 12 + 2, False)):
        factors = times(*[1, 2] * (microbatches // 2))
        problem = unequal(4, microbatches, 8, microbatch_factors=factors)
        assert any(name == "priority-lists" for name, _ in starts(problem)) == offered
