"""R11: every schedule returned is valid, within its budgets under any timing, and worth what it says."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optpipe.problem import Problem
from optpipe.verify import verify
from tests.problems import problems
from tests.promises.schedules import PUBLISHED, SEARCHES, answer, check

SEEDS = st.integers(0, 10**6)


@settings(deadline=None, max_examples=1000)
@given(problems(max_microbatches=5), SEEDS)
def test_a_thousand_problems(problem: Problem, seed: int) -> None:
    for method in PUBLISHED:
        schedule = answer(problem, method)
        if schedule is not None:
            check(problem, schedule, 1, Random(seed))


@pytest.mark.parametrize("method", SEARCHES)
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems(), seed=SEEDS)
def test_searches(method: str, problem: Problem, seed: int) -> None:
    """No search is worse than what is published, and none breaks a rule."""
    schedule = answer(problem, method)
    for other in (answer(problem, name) for name in PUBLISHED):
        if other is not None:
            assert schedule is not None
            assert schedule.value_us <= other.value_us + 1e-9
    if schedule is not None:
        check(problem, schedule, 3, Random(seed))


@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(problems().filter(lambda problem: any(stage.offload for stage in problem.stages)), SEEDS)
def test_a_thousand_timings(problem: Problem, seed: int) -> None:
    """And the largest peak under any timing, which the verifier computes exactly, is no less than any that was seen."""
    schedule = answer(problem, "cp-sat")
    if schedule is not None:
        assert verify(schedule).ok
        check(problem, schedule, 1000, Random(seed))
