"""What every method answers to a problem, and what is checked of it by code that no solver uses."""

from __future__ import annotations

import re

import pytest

from optpipe.errors import InfeasibleError, MethodError, NoSolutionError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.limits import Limits
from solver.methods import METHODS
from solver.solve import solve
from tests.random_timings import exceeded, random_peaks_bytes

PUBLISHED = [name for name, method in METHODS.items() if method.kind == "published"]
SEARCHES = [name for name in METHODS if name not in PUBLISHED]

TIMINGS = 1000
"""Executions of every schedule, each under random durations of its own."""


def answer(problem: Problem, method: str, gap: float = 0.0) -> Schedule | None:
    """The schedule of a method within a second; None where it gives a reason, with numbers, for having none."""
    try:
        return solve(problem, method, Limits(1, gap=gap, workers=1))
    except (MethodError, InfeasibleError, NoSolutionError) as error:
        reason = str(error)
    assert re.search(r"(\d.*|proved: .*) Maybe ", reason)
    return None


def check(problem: Problem, schedule: Schedule, seed: int) -> None:
    """No rule is broken, the value is what the orders give, and no device exceeds its budget under random timings.

    Nor is the largest peak under any timing, which the verifier computes exactly, ever exceeded.
    """
    assert verify(schedule).ok
    assert schedule.problem == problem
    assert simulate(problem, schedule.orders).value_us == pytest.approx(schedule.value_us, rel=1e-9, abs=1e-9)
    peaks_bytes = random_peaks_bytes(problem, schedule.orders, TIMINGS, seed)
    assert not exceeded(problem, peaks_bytes)
    assert (peaks_bytes <= [device.peak_bytes_any_timing for device in schedule.devices]).all()
