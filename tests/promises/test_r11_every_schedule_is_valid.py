"""R11: every schedule returned is valid, within its budgets under any timing, and worth what it says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.problem import Problem
from tests.placed_problems import placed_problems
from tests.problems import problems
from tests.promises.harness import PUBLISHED, SEARCHES, answer, check
from tests.sample import RARELY, examples

SEEDS = st.integers(0, 10**6)


@settings(max_examples=examples(1000, RARELY))
@given(placed_problems() | problems(max_microbatches=5), SEEDS)
def test_a_thousand_problems(problem: Problem, seed: int) -> None:
    for method in PUBLISHED:
        schedule = answer(problem, method)
        if schedule is not None:
            check(problem, schedule, seed)


@pytest.mark.parametrize("method", SEARCHES)
@settings(max_examples=examples(30))
@given(problem=placed_problems(most_microbatches=3) | problems(), seed=SEEDS)
def test_searches(method: str, problem: Problem, seed: int) -> None:
    """No search is worse than what is published, and none breaks a rule."""
    schedule = answer(problem, method)
    for other in (answer(problem, name) for name in PUBLISHED):
        if other is not None:
            assert schedule is not None
            assert schedule.value_us <= other.value_us + 1e-9
    if schedule is not None:
        check(problem, schedule, seed)
