"""The local search: never worse than its start, known optima, the same answer for the same seed and work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from optpipe.orders import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.finish import within_budgets
from solver.floor import serial_orders
from solver.limits import Answer, Limits, Start
from solver.search.local import local_search
from tests.problems import KNOWN_OPTIMA, problems, uniform


def start_at(problem: Problem, orders: Orders | None) -> Start:
    value = simulate(problem, orders).value_us if orders else float("inf")
    return Start(0.0, 1e9, orders, value)


def search(problem: Problem, work: float, seed: int = 0) -> tuple[Answer, list[Answer]]:
    reported: list[Answer] = []
    start = start_at(problem, serial_orders(problem))
    answer = local_search(problem, Limits(deterministic_limit=work, seed=seed), start, reported.append)
    return answer, reported


@given(problems())
@settings(max_examples=40, deadline=None)
def test_every_reported_answer_is_better_within_budgets_and_worth_what_it_says(problem: Problem) -> None:
    answer, reported = search(problem, 0.02)
    values = [start_at(problem, serial_orders(problem)).value_us, *(better.value_us for better in reported)]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == len(values)
    for better in reported:
        assert better.orders is not None
        simulation = simulate(problem, better.orders)
        assert simulation.value_us == better.value_us
        assert within_budgets(problem, better.orders, simulation)
    assert answer.value_us == values[-1]


@pytest.mark.parametrize("name", ["makespan", "device_span"])
def test_known_optima_are_found_from_the_floor(name: str) -> None:
    problem, optimum = KNOWN_OPTIMA[name]
    assert search(problem, 1.0)[0].value_us == optimum


def test_one_seed_and_one_amount_of_work_give_one_answer() -> None:
    problem = uniform(4, 12, budget=6)
    first, again = (search(problem, 0.3, seed=7)[1] for _ in range(2))
    assert [answer.value_us for answer in first] == [answer.value_us for answer in again]
    assert [answer.orders for answer in first] == [answer.orders for answer in again]


def test_without_any_schedule_the_floor_is_where_it_begins() -> None:
    problem = uniform(2, 4, budget=4)
    limits = Limits(deterministic_limit=0.1)
    answer = local_search(problem, limits, Start(0.0, 1e9), lambda better: None)
    assert answer.orders is not None
    assert answer.value_us < start_at(problem, serial_orders(problem)).value_us


def test_other_starts_are_used() -> None:
    problem = uniform(2, 4, budget=4)
    good, _ = search(problem, 0.5)
    limits = Limits(deterministic_limit=0.0)
    assert good.orders is not None
    poor = start_at(problem, serial_orders(problem))
    assert local_search(problem, limits, poor, lambda better: None, others=[good.orders]).value_us <= good.value_us


def test_a_cancelled_search_returns_its_start() -> None:
    problem = uniform(4, 8, budget=8)
    limits = Limits(time_limit_s=600)
    limits.cancel.request()
    start = start_at(problem, serial_orders(problem))
    reported: list[Answer] = []
    answer = local_search(problem, limits, start, reported.append)
    assert answer == Answer(start.orders, start.value_us, start.bound_us)
    assert not reported


def test_it_stops_at_the_gap() -> None:
    problem, optimum = KNOWN_OPTIMA["makespan"]
    start = start_at(problem, serial_orders(problem))
    at_optimum = Start(optimum, start.horizon_us, start.orders, start.value_us)
    assert local_search(problem, Limits(time_limit_s=600), at_optimum, lambda better: None).value_us == optimum
