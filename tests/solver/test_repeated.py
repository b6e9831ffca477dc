"""Starts for many microbatches, made of published schedules of few."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from optpipe.errors import MethodError
from optpipe.orders import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.board import Board
from solver.finish import within_budgets
from solver.limits import Limits
from solver.methods import METHODS, published_orders
from solver.repeated import lengthened, repeated_published
from solver.starts import offer_published
from tests.problems import instance, problems, uniform


def with_microbatches(problem: Problem, microbatches: int) -> Problem:
    return Problem.from_data(problem.to_data() | {"microbatches": microbatches})


def repeated(name: str, problem: Problem) -> Orders:
    make = METHODS[name].orders
    assert make is not None
    return repeated_published(make, problem)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("zb-auto", uniform(4, 67, budget=8)),
        ("zb-v", uniform(4, 66, budget=16, v_shape=True)),
        ("v-half", uniform(4, 66, budget=12, v_shape=True)),
        ("v-zb", uniform(3, 72, v_shape=True)),
        ("zb-h1", with_microbatches(instance("zb-1.5b-p8-m24-mem1.5"), 256)),
    ],
)
def test_is_as_good_as_the_published_schedule_for_all_microbatches(name: str, problem: Problem) -> None:
    orders = repeated(name, problem)
    simulation = simulate(problem, orders)
    assert within_budgets(problem, orders, simulation)
    published = simulate(problem, published_orders(METHODS[name], problem)).value_us
    assert simulation.value_us == pytest.approx(published)


def test_few_microbatches_are_left_to_the_schedules_themselves() -> None:
    with pytest.raises(MethodError, match="31 microbatches are too few"):
        repeated("zb-auto", uniform(4, 31, budget=8))


def test_every_published_schedule_still_comes() -> None:
    """The best on the board is at least as good as every published schedule that fits."""
    problem = uniform(4, 256, budget=12, v_shape=True)
    board = Board(problem, Limits(30), None)
    offer_published(problem, board)
    for method in METHODS.values():
        try:
            orders = published_orders(method, problem) if method.orders else None
        except MethodError:
            continue
        assert orders is None or board.best.value_us <= simulate(problem, orders).value_us


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
