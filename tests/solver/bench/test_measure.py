"""A run has a curve whose values fall, and a reason where there is no schedule; bugs of a method are outcomes."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from optpipe.problem import Problem
from solver.bench.measure import Measured, Point, measure
from solver.limits import Answer, Limits, Start
from solver.methods import METHODS, Method
from tests.problems import HALF, uniform
from tests.solver.bench.suites import PROBLEM, figures


def test_the_curve_falls_to_the_schedule() -> None:
    problem = uniform(3, 4, budget=4, offload=HALF)
    run = measure(problem, "cp-sat", Limits(10, workers=1))
    assert run.figures is not None
    assert run.curve[-1].value_us == run.figures.value_us
    assert run.curve[-1].bound_us == run.figures.bound_us
    assert run.proof_seconds == run.curve[-1].seconds
    for earlier, later in pairwise(run.curve):
        assert earlier.seconds <= later.seconds
        assert earlier.value_us >= later.value_us
        assert earlier.bound_us <= later.bound_us
        assert earlier[1:3] != later[1:3]


def test_a_published_schedule_is_one_point() -> None:
    run = measure(PROBLEM, "1f1b", Limits())
    assert run.figures is not None
    assert [(point.value_us, point.method) for point in run.curve] == [(run.figures.value_us, "1f1b")]


def test_a_method_that_cannot_says_why() -> None:
    run = measure(PROBLEM, "gpipe", Limits())
    assert (run.figures, run.failed, run.curve) == (None, False, ())
    assert "its budget is 4" in run.why_not


def test_a_bug_of_a_method_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: Problem, *_: object) -> None:
        raise AssertionError("no such stage")

    monkeypatch.setattr("solver.bench.measure.solve_until_interrupted", broken)
    run = measure(PROBLEM, "auto", Limits())
    assert run.failed
    assert run.why_not == "AssertionError: no such stage"


def test_a_search_that_outlives_its_limit_is_over_before_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def stubborn(problem: Problem, limits: Limits, start: Start, *_: object) -> Answer:
        time.sleep(1.5)
        ended.append(limits.seconds)
        return Answer(start.orders, start.value_us, start.bound_us)

    monkeypatch.setitem(METHODS, "stubborn", Method("stubborn", "search", "", "", search=stubborn))
    monkeypatch.setattr("solver.portfolio.offer_published", lambda problem, board: None)
    run = measure(PROBLEM, "stubborn", Limits(0.5))
    assert "nothing within the budgets was found" in run.why_not
    assert [seconds > run.seconds for seconds in ended] == [True]


def test_reading_a_curve() -> None:
    curve = (Point(1.0, 9, 4, "1f1b"), Point(3.0, 8, 4, "cp-sat"), Point(4.0, 8, 8, "cp-sat"))
    run = Measured(figures(), "", False, 5.0, False, curve)
    assert [run.at(seconds) for seconds in (0.5, 1.0, 2.0, 10.0)] == [None, curve[0], curve[0], curve[2]]
    assert [run.seconds_to(value) for value in (9.5, 8, 7)] == [1.0, 3.0, None]
    assert run.proof_seconds is None
