"""List schedules with other numbers of microbatches in flight: valid, within the budgets, close to the best number."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest

from instances import HALF, WHOLE, instance, uniform
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.build import build_schedule, within_budgets
from solver.limits import Cancel, Limits
from solver.lists.memory import Rules
from solver.methods import METHODS, published_orders
from solver.search.in_flight import (
    LATE_WEIGHTS,
    Evaluations,
    ListScheduler,
    first_in_memory,
    improving,
    in_flight_search,
    varied,
)
from solver.solution import Solution
from tests.sample import some

WORK = Limits(deterministic_limit=20.0)
PROBLEMS = [
    uniform(8, 24, budget=8, offload=HALF),
    uniform(8, 24, budget=6, offload=WHOLE),
    uniform(6, 12, v_shape=True, budget=14, offload=HALF),
    uniform(4, 12, budget=5, offload=HALF, copy_channels={"duplex": False, "shared_by": [[0, 1], [2, 3]]}),
]


def offloading(problem: Problem) -> ListScheduler:
    """ListScheduler in which activations leave wherever they may."""
    return ListScheduler(
        problem, [0] * len(problem.stages), [int(stage.offload is not None) for stage in problem.stages]
    )


@pytest.mark.parametrize("problem", some(PROBLEMS, 2))
def test_what_it_finds_is_valid_and_no_worse_than_ada_offload(problem: Problem) -> None:
    found: list[Solution] = []
    best = in_flight_search(problem, WORK, Solution(), found.append)
    assert found[-1] == best
    assert [solution.value_us for solution in found] == sorted({solution.value_us for solution in found}, reverse=True)
    assert best.orders is not None
    schedule = build_schedule(problem, best.orders, lower_bound_us(problem), "ada-offload", 0.0)  # verifies it
    assert schedule.value_us == best.value_us
    assert best.value_us <= simulate(problem, published_orders(METHODS["ada-offload"], problem)).value_us


@pytest.mark.parametrize("problem", PROBLEMS[:3])
def test_the_steps_lead_close_to_the_best_of_all_numbers(problem: Problem) -> None:
    lists = offloading(problem)
    evaluations = Evaluations(lists, WORK)
    (*_, choice) = improving(evaluations)
    every = Evaluations(lists, Limits(deterministic_limit=inf))
    numbers = range(1, problem.units + 1)
    best_us = min(every.value_us(Rules(n, late, tail=1)) for n, late in product(numbers, LATE_WEIGHTS))
    assert evaluations.value_us(choice) <= 1.05 * best_us
    assert evaluations.played < every.played


def test_many_microbatches_take_the_choice_of_few() -> None:
    problem = uniform(4, 200, budget=4, offload=HALF)
    best = in_flight_search(problem, WORK, Solution(), lambda _: None)
    assert best.orders is not None
    assert within_budgets(problem, best.orders, simulate(problem, best.orders))
    whole = Evaluations(offloading(problem), WORK)
    assert best.value_us <= 1.02 * min(whole.value_us(choice) for choice in improving(whole))


def test_a_good_start_waits_for_a_better_choice_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders of a million ops take seconds to make and to judge."""
    problem, bound_us = uniform(8, 32, budget=8, offload=HALF), 1e6
    made: list[Rules] = []
    make = ListScheduler.orders
    monkeypatch.setattr(ListScheduler, "orders", lambda lists, choice: made.append(choice) or make(lists, choice))
    first = ListScheduler(problem, [0] * 8, [1] * 7 + [0]).first
    for gap, times in ((0.5, 1), (0.05, 0)):
        start = Solution(first_in_memory(problem), bound_us / (1 - gap), bound_us)
        made.clear()
        in_flight_search(problem, WORK, start, lambda _: None)
        assert made.count(first) == times


def test_memory_without_such_lists_has_no_first_ones() -> None:
    assert first_in_memory(uniform(4, 12, budget=5)) is None
    problem = uniform(4, 12, budget=5, offload=HALF)
    assert first_in_memory(problem) is not None
    assert first_in_memory(Problem.from_data(problem.to_data() | {"host_memory_bytes": 4})) is None


def test_random_choices_go_on_where_steps_find_nothing_better() -> None:
    """Eight devices, two behind each channel, with four chunks each: steps end at 56,500 us."""
    problem = instance("d-p8-m16-o1-mo1-b1o4-interleaved4-make-pairs")
    lists = ListScheduler(problem, [0] * 32, [1] * 32)
    evaluations = Evaluations(lists, Limits(deterministic_limit=0.3))
    (*_, choice) = improving(evaluations)
    values_us = [evaluations.value_us(choice), *map(evaluations.value_us, varied(evaluations))]
    assert values_us == sorted(set(values_us), reverse=True)
    assert values_us[-1] < 0.985 * values_us[0]
    again = Evaluations(lists, Limits(deterministic_limit=0.3))
    list(improving(again))
    assert [again.value_us(choice) for choice in varied(again)] == values_us[1:]


def test_nothing_is_searched_after_a_cancel() -> None:
    cancel = Cancel()
    cancel.request()
    start = Solution(bound_us=1.0)
    assert in_flight_search(PROBLEMS[0], Limits(60, cancel=cancel), start, lambda _: None) == start


def test_a_better_start_stays() -> None:
    problem = PROBLEMS[0]
    start = Solution(published_orders(METHODS["ada-offload"], problem), 1.0, 1.0, "ada-offload")
    assert in_flight_search(problem, WORK, start, lambda _: None) is start
