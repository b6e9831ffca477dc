"""Every method on random problems: a valid schedule within every budget under any timing, or a stated reason."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optpipe.errors import InfeasibleError, MethodError, NoSolutionError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.bounds import lower_bound_us
from solver.limits import Limits
from solver.methods import METHODS
from solver.portfolio import solve
from tests.problems import problems
from tests.random_plans import execute, peak_bytes

PUBLISHED = [name for name, method in METHODS.items() if method.kind == "published"]


def solved(problem: Problem, method: str) -> Schedule | str:
    """The schedule, or the reason why there is none."""
    try:
        return solve(problem, method, Limits(10, workers=1))
    except (MethodError, InfeasibleError, NoSolutionError) as reason:
        return str(reason)


def check(problem: Problem, method: str, rng: Random) -> float | None:
    """Check everything that is promised of a returned schedule; its value, None where there is a reason."""
    schedule = solved(problem, method)
    if isinstance(schedule, str):
        assert "Maybe" in schedule
        return None
    assert verify(schedule).ok
    assert simulate(problem, schedule.orders).value_us == pytest.approx(schedule.value_us, rel=1e-9, abs=1e-9)
    assert lower_bound_us(problem) <= schedule.bound_us + 1e-9 <= schedule.value_us + 2e-9
    for _ in range(5):
        durations = {op: rng.choice([0.0, 1.0, 50.0]) * rng.random() for op in schedule.orders.ops()}
        executed = execute(problem, schedule.orders, durations)
        for d, device in enumerate(problem.devices):
            assert device.memory_bytes is None or peak_bytes(problem, executed, d) <= device.memory_bytes
    return schedule.value_us


@settings(deadline=None, max_examples=1000)
@given(problems(max_microbatches=5), st.integers(0, 10**6))
def test_published_schedules(problem: Problem, seed: int) -> None:
    for method in PUBLISHED:
        check(problem, method, Random(seed))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.integers(0, 10**6))
def test_cp_sat_and_that_nothing_published_is_better(problem: Problem, seed: int) -> None:
    value = check(problem, "cp-sat", Random(seed))
    others = [check(problem, method, Random(seed)) for method in PUBLISHED]
    for other in others:
        if other is not None:
            assert value is not None
            assert value <= other + 1e-9
