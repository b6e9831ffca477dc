"""The cache is asked once, filled once, and credits a search with the time that it was allowed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from instances import uniform
from optpipe.ops import Orders
from optpipe.problem import Problem
from solver import cache as cache_module
from solver import solve
from solver.cache import Cache, Canonical, canonical_form
from solver.limits import Limits
from solver.process import ChildResult, cpu_seconds_given, solve_cached

PROBLEM = uniform(4, 8, budget=8)


class Searches:
    """Answers with 1F1B and notes the starts that it is given."""

    def __init__(self, problem: Problem = PROBLEM) -> None:
        self.problem = problem
        self.starts: list[Sequence[Orders]] = []

    def __call__(self, starts: Sequence[Orders]) -> ChildResult:
        self.starts.append(starts)
        return ChildResult(solve(self.problem, "1f1b"), "feasible", "time")


def test_the_second_solve_is_answered_from_the_cache(tmp_path: Path) -> None:
    searches, limits = Searches(), Limits(10, workers=2)
    first = solve_cached(PROBLEM, "auto", limits, searches, Cache(tmp_path))
    second = solve_cached(PROBLEM, "auto", limits, searches, Cache(tmp_path))
    assert (first.from_cache, second.from_cache, len(searches.starts)) == (False, True, 1)
    assert first.schedule is not None
    assert second.schedule is not None
    assert second.schedule.orders == first.schedule.orders
    solve_cached(PROBLEM, "auto", Limits(10, workers=3), searches, Cache(tmp_path))
    assert len(searches.starts) == 2, "more threads are more time than it was searched for"


def test_schedules_for_other_microbatches_are_starts(tmp_path: Path) -> None:
    larger = uniform(4, 12, budget=8)
    solve_cached(PROBLEM, "auto", Limits(1), Searches(), Cache(tmp_path))
    searches = Searches(larger)
    solve_cached(larger, "auto", Limits(1), searches, Cache(tmp_path))
    assert len(searches.starts[0]) == 1


def test_the_canonical_form_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Problem] = []

    def counted(problem: Problem) -> Canonical:
        computed.append(problem)
        return canonical_form(problem)

    monkeypatch.setattr(cache_module, "canonical_form", counted)
    solve_cached(PROBLEM, "auto", Limits(1), Searches(), Cache(tmp_path))
    assert len(computed) == 1


def test_a_search_that_something_else_ended_is_credited_with_its_own_time() -> None:
    assert cpu_seconds_given(30, 2, None, 1.5) == cpu_seconds_given(30, 2, "time", 30.1) == 60
    assert cpu_seconds_given(30, 2, "interrupted", 1.5) == cpu_seconds_given(30, 2, "memory", 1.5) == 3
