"""1F1B within memory: within every budget that has room for one microbatch, no deadlock, 1F1B where all of it fits."""

from __future__ import annotations

from random import Random

import pytest

from optpipe.errors import MethodError
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import peak_budgets, within_budgets
from solver.limits import Limits
from solver.published.one_stage import one_f_one_b
from solver.published.within_memory import one_f_one_b_within_memory
from solver.strategy import SharedIncumbent
from solver.warm_starts import offer_published
from tests.sample import some
from tests.unequal import random_pipeline, times, unequal

ALONE = {"microbatch_factors": None, "microbatch_order": "given"}


def least_budgets(problem: Problem) -> list[int]:
    """The most that one microbatch needs on each device while it has the pipeline to itself."""
    needed = [0] * len(problem.devices)
    for i in range(problem.microbatches):
        own = problem.microbatch_factors
        data = problem.to_data() | ALONE | {"microbatches": 1, "microbatch_factors": own and [own[i].to_data()]}
        alone = Problem.from_data(data)
        needed = list(map(max, needed, peak_budgets(alone, one_f_one_b_within_memory(alone))))
    return needed


@pytest.mark.parametrize("first", some(range(0, 60, 6)))
def test_any_placement_within_the_least_memory_and_a_little_more(first: int) -> None:
    for seed in range(first, first + 6):
        rng = Random(seed)
        problem = random_pipeline(rng)
        budgets = [size + rng.choice([0, 0, 1, size // 2]) for size in least_budgets(problem)]
        tight = problem.from_data(problem.to_data() | {"devices": [{"memory_bytes": size} for size in budgets]})
        orders = one_f_one_b_within_memory(tight)
        assert within_budgets(tight, orders, simulate(tight, orders)), seed
        device = rng.randrange(len(budgets))
        if budgets[device] == least_budgets(problem)[device] > 0:
            budgets[device] -= 1
            small = problem.from_data(problem.to_data() | {"devices": [{"memory_bytes": size} for size in budgets]})
            with pytest.raises(MethodError, match=rf"bytes on device {device}, but its budget is {budgets[device]}\."):
                one_f_one_b_within_memory(small)


def test_1f1b_where_its_memory_is_there() -> None:
    problem = unequal(4, 8, split_backward=False)
    budgets = [{"memory_bytes": size} for size in peak_budgets(problem, one_f_one_b(problem))]
    enough = problem.from_data(problem.to_data() | {"devices": budgets})
    assert simulate(enough, one_f_one_b_within_memory(enough)).value_us == (8 + 3) * 3


def test_it_is_offered_where_no_published_method_fits() -> None:
    problem = unequal(
        4, 6, 12, microbatch_factors=[{"time": f, "bytes": f} for f in (1, 2, 1, 2, 1, 2)], split_backward=False
    )
    shared = SharedIncumbent(problem, Limits(60), None)
    offer_published(problem, shared)
    assert shared.best.method == "1f1b, within-memory"
    assert shared.best.value_us < 3 * 4 * 9, "one microbatch at a time"


def test_too_many_ops_are_left_to_others() -> None:
    with pytest.raises(MethodError, match="too many to fit"):
        one_f_one_b_within_memory(unequal(4, 10_000, 8, microbatch_factors=times(*[1, 2] * 5_000)))
