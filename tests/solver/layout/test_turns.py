"""A plan ends by its limit however late everything in it is: by a scripted clock, no time passes here."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from optpipe.orders import Orders
from optpipe.problem import Problem
from solver.finish import finish
from solver.layout import ranking
from solver.layout.candidates import Search, candidates
from solver.layout.ranking import rank
from solver.layout.turns import LEAST_S, Turns
from solver.limits import Limits
from solver.process import ChildResult
from tests.layer_profiles import profile

PROMISE_S = 2.0
"""What a solve in a child may take over its limit."""


@dataclass(frozen=True)
class Scripted(Limits):
    """Limits by a clock that a test sets forward."""

    now_s: list[float] = field(default_factory=lambda: [0.0])

    @property
    def seconds(self) -> float:
        return self.now_s[0]

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s[0] += seconds


@pytest.mark.parametrize("limit_s", [5.0, 20.0, 60.0])
def test_every_solve_takes_as_long_as_it_is_allowed(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
    """Each answers at its own limit plus two seconds, none proves anything, and all may still win."""
    clock = Scripted(limit_s, workers=1)
    given: list[float] = []

    def latest(problem: Problem, method: str, limits: Limits, starts: list[Orders]) -> ChildResult:
        given.append(limits.time_limit_s)
        clock.wait(limits.time_limit_s + PROMISE_S)
        return ChildResult(finish(problem, starts[0], 0.0, method, 0.0), "feasible", "time")

    monkeypatch.setattr(ranking, "solve_in_child", latest)
    judged = rank(candidates(profile(8, head=3), Search(2, 8, (1, 2, 4)), clock), clock)
    assert judged[0].schedule is not None
    assert given
    assert min(given) >= LEAST_S
    assert clock.seconds <= limit_s + PROMISE_S


def test_what_one_takes_too_long_the_next_ones_lack() -> None:
    clock = Scripted(31.0)
    turns = Turns(clock, 1.0, 5, cores=2)
    assert [turns.begin(), turns.begin()] == [10.0, 15.0]  # three in thirty seconds on one core, two on the other
    clock.wait(12)
    assert turns.begin() == 9.0
    clock.wait(4)
    assert turns.begin() == 14.0
    clock.wait(13)
    assert turns.begin() is None


def test_cutting_ends_with_the_time_for_it() -> None:
    clock = Scripted(10.0)
    found = []
    for one in candidates(profile(8, head=3), Search(2, 4, (1, 2), ("linear",)), clock):
        found.append(one)
        clock.wait(3)
    reasons = [(one.cut, one.why_not) for one in found]
    assert reasons == [("even", ""), ("balanced", ""), ("even", ""), ("balanced", "there was no time to cut it")]
