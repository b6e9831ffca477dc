"""Starts for many microbatches, made of published schedules of few."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from optpipe.errors import MethodError
from optpipe.orders import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.board import Board
from solver.bounds import lower_bound_us
from solver.finish import within_budgets
from solver.limits import Limits
from solver.methods import METHODS, published_orders
from solver.repeated import lengthened, repeated_published
from solver.starts import offer_published
from tests.problems import instance, problems, uniform


def with_microbatches(problem: Problem, microbatches: int) -> Problem:
    return Problem.from_data(problem.to_data() | {"microbatches": microbatches})


@pytest.mark.parametrize(
    "problem", [uniform(4, 67, budget=8), uniform(4, 66, budget=12, v_shape=True), uniform(3, 72, v_shape=True)]
)
def test_the_first_promises_most_and_keeps_it(problem: Problem) -> None:
    """Its value is that of the published schedule for all microbatches."""
    found = repeated_published(problem, 0)
    assert [repeated.promise_us for repeated in found] == sorted(repeated.promise_us for repeated in found)
    best = found[0]
    simulation = simulate(problem, best.orders)
    assert simulation.value_us == pytest.approx(best.promise_us)
    assert within_budgets(problem, best.orders, simulation)
    published = simulate(problem, published_orders(METHODS[best.method], problem)).value_us
    assert simulation.value_us == pytest.approx(published)


def test_measured_costs_keep_their_promise() -> None:
    problem = with_microbatches(instance("zb-1.5b-p8-m24-mem1.5"), 256)
    best = repeated_published(problem, 0)[0]
    assert simulate(problem, best.orders).value_us == pytest.approx(best.promise_us)


def test_few_microbatches_are_left_to_the_schedules_themselves() -> None:
    assert not repeated_published(uniform(4, 31, budget=8), 0)


def test_the_rest_is_not_looked_at_once_one_is_good_enough() -> None:
    problem = uniform(4, 64, budget=8)
    assert len(repeated_published(problem, lower_bound_us(problem))) < len(repeated_published(problem, 0))


@pytest.fixture
def offered() -> Board:
    board = Board(uniform(4, 256, budget=12, v_shape=True), Limits(30), None)
    offer_published(board.problem, board)
    return board


def test_they_come_first_and_the_published_ones_still_come(offered: Board) -> None:
    """The best on the board is at least as good as every published schedule that fits."""
    problem = offered.problem
    assert offered.method.endswith(", repeated")
    for method in METHODS.values():
        try:
            orders = published_orders(method, problem) if method.orders else None
        except MethodError:
            continue
        assert orders is None or offered.best.value_us <= simulate(problem, orders).value_us


def test_what_is_no_period_is_not_repeated() -> None:
    """GPipe runs all F first: between two of them there is no B."""
    problem = uniform(2, 8)
    assert lengthened(problem, published_orders(METHODS["gpipe"], problem), 3, 1, 5) is None


@settings(deadline=None, max_examples=60)
@given(problems(max_microbatches=5))
def test_every_microbatch_of_a_serial_schedule_is_a_period(problem: Problem) -> None:
    """Repeating it gives the serial schedule of more microbatches, on any placement."""
    more = with_microbatches(problem, problem.microbatches + 3)
    for begin in range(problem.microbatches - 1):
        assert lengthened(problem, _serial(problem), begin, 1, 3) == _serial(more)


def _serial(problem: Problem) -> Orders:
    """One microbatch after another, without transfers."""
    stages = range(len(problem.stages))
    plan = [("F", s) for s in stages] + [(kind, s) for s in reversed(stages) for kind in "BW"]
    return Orders.of_compute(
        [Op(kind, s, i) for i in range(problem.microbatches) for kind, s in plan if problem.stages[s].device == d]
        for d in range(len(problem.devices))
    )
