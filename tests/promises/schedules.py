"""What every method answers to a problem, and what is checked of it by code that no solver uses."""

from __future__ import annotations

from random import Random

import pytest

from optpipe.errors import InfeasibleError, MethodError, NoSolutionError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.limits import Limits
from solver.methods import METHODS
from solver.portfolio import solve
from tests.random_plans import execute, peak_bytes

PUBLISHED = [name for name, method in METHODS.items() if method.kind == "published"]
SEARCHES = [name for name in METHODS if name not in PUBLISHED]


def answer(problem: Problem, method: str, gap: float = 0.0) -> Schedule | None:
    """The schedule of a method within a second; None where it gives a reason for having none."""
    try:
        return solve(problem, method, Limits(1, gap=gap, workers=1))
    except (MethodError, InfeasibleError, NoSolutionError) as error:
        reason = str(error)
    assert "Maybe" in reason
    return None


def check(problem: Problem, schedule: Schedule, timings: int, rng: Random) -> None:
    """No rule is broken, the value is what the orders give, and no device exceeds its budget under random timings."""
    assert verify(schedule).ok
    assert schedule.problem == problem
    assert simulate(problem, schedule.orders).value_us == pytest.approx(schedule.value_us, rel=1e-9, abs=1e-9)
    for _ in range(timings):
        durations = {op: rng.choice([0.0, 1.0, 50.0]) * rng.random() for op in schedule.orders.ops()}
        executed = execute(problem, schedule.orders, durations)
        for d, device in enumerate(problem.devices):
            assert device.memory_bytes is None or peak_bytes(problem, executed, d) <= device.memory_bytes
