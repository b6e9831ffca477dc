"""Where a child brings nothing, the parent's own published schedule is the answer."""

from __future__ import annotations

import pytest

from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.board import Board
from solver.bounds import lower_bound_us
from solver.finish import within_budgets
from solver.floor import serial_orders
from solver.limits import Limits
from solver.process import Child, solve_in_child
from solver.process.spare import Spare
from solver.starts import offer_published
from tests.problems import HALF, uniform

LIMIT_S = 4.0


def floor_us(problem: Problem) -> float:
    orders = serial_orders(problem)
    assert orders is not None
    return simulate(problem, orders).value_us


@pytest.mark.parametrize(
    "problem",
    [
        uniform(4, 8),
        uniform(4, 8, budget=6),
        uniform(4, 8, budget=3, offload=HALF),
        uniform(4, 8, v_shape=True, budget=12),
    ],
)
def test_the_best_that_fits(problem: Problem) -> None:
    spare = Spare(problem, Limits(LIMIT_S))
    spare.make()
    assert spare.best is not None
    simulation = simulate(problem, spare.best.orders)
    assert simulation.value_us == spare.best.value_us
    assert within_budgets(problem, spare.best.orders, simulation)
    assert spare.best.value_us < floor_us(problem)
    assert spare.bound_us == lower_bound_us(problem)


def test_nothing_is_made_that_nobody_waits_for() -> None:
    spare = Spare(uniform(4, 8), Limits(LIMIT_S))
    spare.stop()
    spare.make()
    assert spare.best is None


def test_a_child_that_never_begins() -> None:
    problem = uniform(8, 64, budget=7)
    limits = Limits(LIMIT_S, workers=1)
    with Child("tests.solver.process.asleep") as child:
        result = solve_in_child(problem, "auto", limits, child=child)
    assert limits.seconds <= LIMIT_S + 2
    assert (result.reason, result.limit) == ("feasible", "time")
    assert result.schedule is not None
    assert verify(result.schedule).ok
    board = Board(problem, Limits(LIMIT_S), None)
    offer_published(problem, board)
    assert result.schedule.method == board.method
    assert result.schedule.value_us == board.best.value_us < floor_us(problem) / 2
