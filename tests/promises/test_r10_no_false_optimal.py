"""R10: a schedule is called optimal only if it is valid and nothing, whoever found it, is better."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.problem import Problem
from optpipe.verify import verify
from solver.bounds import lower_bound_us
from tests.problems import KNOWN_OPTIMA, problems
from tests.promises.harness import PUBLISHED, SEARCHES, answer
from tests.sample import examples

ROUNDING_US = 1e-6


@settings(max_examples=examples(40))
@given(problems(), st.sampled_from([0.0, 0.0, 0.1]))
def test_no_method_is_better_than_what_another_proved(problem: Problem, gap: float) -> None:
    """Every bound holds for every schedule; `optimal` is a valid schedule at its bound; nothing else is called so."""
    found = {name: answer(problem, name, gap) for name in (*PUBLISHED, *SEARCHES)}
    schedules = {name: schedule for name, schedule in found.items() if schedule is not None}
    for schedule in schedules.values():
        assert (schedule.status == "optimal") == (schedule.gap == 0)
        assert verify(schedule).ok
        assert lower_bound_us(problem) <= schedule.bound_us + ROUNDING_US
    for (one, proved), (other, schedule) in product(schedules.items(), repeat=2):
        assert proved.bound_us <= schedule.value_us + ROUNDING_US, f"{one} proved what {other} disproves"


@pytest.mark.parametrize("method", SEARCHES)
@pytest.mark.parametrize("name", KNOWN_OPTIMA)
def test_bounds_of_problems_whose_optimum_is_known(method: str, name: str) -> None:
    problem, optimum = KNOWN_OPTIMA[name]
    schedule = answer(problem, method)
    assert schedule is not None
    assert schedule.bound_us <= optimum <= schedule.value_us
    assert (schedule.status == "optimal") == (schedule.value_us == schedule.bound_us)
