"""Candidates: names of their problems, and how they share the time."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import pytest

from optpipe.layers import LayerProfile
from optpipe.ops import Orders
from optpipe.partition import cut_in_name
from optpipe.problem import Problem
from solver.build import build_schedule
from solver.layout import cuts, ranking
from solver.layout.candidates import LEAST_S, Search, TimeSlices, candidates
from solver.layout.ranking import rank
from solver.limits import Limits
from solver.process import ChildResult
from tests.layer_profiles import BLOCK, profile, tight_profile
from tests.sample import some

pytestmark = pytest.mark.usefixtures("forked_children")


def test_the_name_of_a_problem_ends_with_its_cut() -> None:
    """Training reads it there; a name that would be too long stays what it is."""
    search = Search(2, 4, [1], ["linear", "v"])
    for name, named in (("toy", True), ("", False), ("t" * 195, False)):
        for candidate in candidates(profile(5, head=3, name=name), search, Limits(1e-9)):
            assert candidate.layout is not None
            assert candidate.problem is not None
            cut = ",".join(map(str, candidate.layout.sizes)) if named else None
            assert cut_in_name(candidate.problem.name) == cut
            assert candidate.problem.name == (f"{name}, cut {cut}" if named else name)


def test_layouts_that_may_not_offload_have_no_modes_that_do() -> None:
    block = BLOCK | {"recomputation": {"kept_bytes": 20, "offload_bytes": 20}}
    copies = {"offload_bytes_per_us": 10.0, "reload_bytes_per_us": 10.0}
    given = LayerProfile.from_data({"format": "optpipe.layers/1", "layers": [block | {"repeat": 4}], "copies": copies})
    found = candidates(given, Search(2, 2, [1], ["linear"], modes=["full", "full+offload"]), Limits(1e-9))
    modes = {one.offload: [mode.name for mode in one.problem.stages[1].modes] for one in found if one.problem}
    assert modes == {False: ["full"], True: ["full", "full+offload"]}


PROMISE_S = 2.0
"""Seconds that a solve in a child may take over its limit."""


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


@pytest.mark.parametrize("limit_s", some([5.0, 20.0, 60.0]))
def test_every_solve_takes_as_long_as_it_is_allowed(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
    """Each answers at its own limit plus two seconds, none proves anything, and all may still win."""
    clock = Scripted(limit_s, workers=1)
    given: list[float] = []

    def latest(problem: Problem, method: str, limits: Limits, starts: list[Orders]) -> ChildResult:
        given.append(limits.time_limit_s)
        clock.wait(limits.time_limit_s + PROMISE_S)
        return ChildResult(build_schedule(problem, starts[0], 0.0, method, 0.0), "feasible", "time")

    monkeypatch.setattr(ranking, "solve_in_child", latest)
    monkeypatch.setattr(ranking, "_with_published", lambda judged, *_: judged)
    monkeypatch.setattr(cuts, "MOST_RATED", 6)
    judged = rank(candidates(tight_profile(), Search(4, 8, (1,), ("interleaved-2", "v")), clock), clock)
    assert judged[0].schedule is not None
    assert given
    assert min(given) >= LEAST_S
    assert clock.seconds <= limit_s + PROMISE_S


def test_what_one_takes_too_long_the_next_ones_lack() -> None:
    clock = Scripted(31.0)
    turns = TimeSlices(clock, 1.0, 5, cores=2)
    assert [turns.begin(), turns.begin()] == [10.0, 15.0]  # three in thirty seconds on one core, two on the other
    clock.wait(12)
    assert turns.begin() == 9.0
    clock.wait(4)
    assert turns.begin() == 14.0
    clock.wait(13)
    assert turns.begin() is None


def test_every_layout_is_rated_after_the_time_for_searching_cuts() -> None:
    """The later ones get one rating each in place of a search."""
    clock = Scripted(10.0)
    found = []
    for one in candidates(profile(8, head=3), Search(2, 4, (1, 2), ("linear", "v")), clock):
        found.append(one)
        clock.wait(1)
    assert len({one.choice for one in found}) == 4
    assert all(any(one.rating for one in found if one.choice == choice) for choice in {one.choice for one in found})


def test_every_layout_has_a_value_before_cuts_of_any_are_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first search takes all the time: the others have first ratings, of which the best becomes a schedule."""
    clock, calls = Scripted(10.0), list[str]()
    begin = cuts.CutSearch.begin

    def begins(search: cuts.CutSearch) -> None:
        calls.append("begin")
        begin(search)

    def extends(_search: cuts.CutSearch, _limits: Limits) -> None:
        calls.append("extend")
        clock.wait(10)

    monkeypatch.setattr(cuts.CutSearch, "begin", begins)
    monkeypatch.setattr(cuts.CutSearch, "extend", extends)
    judged = rank(candidates(tight_profile(), Search(4, 8, (1, 2), ("linear", "interleaved-2", "v")), clock), clock)
    assert calls == [*["begin"] * 6, "extend"]
    assert len({one.candidate.choice for one in judged if one.value_us < inf}) == 6
    assert judged[0].schedule is not None
    assert judged[0].value_us <= min(one.value_us for one in judged)
