"""Solutions that tests begin with or compare with: serial orders, CP-SAT's best, and what a search makes of them."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.build import build_schedule
from solver.exact.cp_sat.model import Options, solve_cp_sat
from solver.limits import Limits
from solver.serial import serial_orders
from solver.solution import OnSolution, Solution


def serial_start(problem: Problem) -> Solution | None:
    """The serial orders without a bound; None where even they need more than the budgets."""
    orders = serial_orders(problem)
    return None if orders is None else Solution(orders, simulate(problem, orders).value_us)


def best_found(problem: Problem, work: float) -> Solution | None:
    """The answer of CP-SAT to the serial orders for so much work, whose value no lower bound may exceed.

    Not from below: without a bound to begin with, that asks for a schedule at each single step of the grid. None where
    even the serial orders need more than the budgets.
    """
    start = serial_start(problem)
    if start is None:
        return None
    return solve_cp_sat(
        problem, Limits(workers=1, deterministic_limit=work), start, lambda _: None, Options(climb=False)
    )


def schedule_found(
    search: Callable[[Problem, Limits, Solution, OnSolution], Solution], problem: Problem, work: float
) -> Schedule:
    """Verified schedule that a search makes of the serial orders for so much work: as claimed, and no worse."""
    start = serial_start(problem)
    assert start is not None
    limits = Limits(float("inf"), workers=1, deterministic_limit=work)
    answer = search(problem, limits, start, lambda _: None)
    assert answer.orders is not None
    schedule = build_schedule(problem, answer.orders, 0.0, "search", 0.0)
    assert schedule.value_us == answer.value_us <= start.value_us
    return schedule
