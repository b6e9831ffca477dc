"""Cuts: as even as can be, or the busiest device's work least, which brute force agrees with."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.layers import LayerProfile
from optpipe.ops import Orders
from optpipe.partition import cut_in_name, parse_placement, placement, work_us
from optpipe.problem import Problem
from solver.build import build_schedule
from solver.layout import ranking
from solver.layout.candidates import LEAST_S, TICKS, Cutter, Search, TimeSlices, balanced_sizes, candidates, even_sizes
from solver.layout.ranking import rank
from solver.limits import Limits
from solver.process import ChildResult
from tests.layer_profiles import BLOCK, profile
from tests.sample import examples


@pytest.mark.parametrize(("layers", "stages", "sizes"), [(7, 3, (3, 2, 2)), (6, 3, (2, 2, 2)), (4, 4, (1, 1, 1, 1))])
def test_even(layers: int, stages: int, sizes: tuple[int, ...]) -> None:
    assert even_sizes(layers, stages) == sizes


def test_a_heavy_head_gets_fewer_layers() -> None:
    assert balanced_sizes(profile(12, head=4), placement("linear", 3, 1)) == (5, 5, 2)


def test_the_ends_of_a_v_share_a_device() -> None:
    sizes = balanced_sizes(profile(15, head=4), placement("v", 3, 2))
    assert sizes is not None
    assert sizes[0] + sizes[-1] == 3  # the head counts as four blocks: 6 of 18 on each device


def test_parameters_and_one_microbatch_fit() -> None:
    given = profile(12, head=10, memory_bytes=5 * 1100)
    sizes = balanced_sizes(given, placement("linear", 3, 1))
    assert sizes is not None
    assert max(sizes) <= 5
    assert balanced_sizes(profile(12, memory_bytes=3 * 1100), placement("linear", 3, 1)) is None


def test_too_few_layers() -> None:
    assert balanced_sizes(profile(3), placement("linear", 4, 1)) is None


def busiest_us(given: LayerProfile, sizes: tuple[int, ...], places: tuple[int, ...]) -> float:
    work, begin = [0.0] * (max(places) + 1), 0
    for size, device in zip(sizes, places, strict=True):
        work[device] += sum(work_us(layer) for layer in given.each_layer[begin : begin + size])
        begin += size
    return max(work)


@settings(max_examples=examples(30))
@given(
    st.lists(st.integers(1, 30), min_size=6, max_size=9),
    st.sampled_from([("linear", 2, 1), ("linear", 3, 1), ("v", 2, 2), ("interleaved", 2, 2)]),
)
def test_no_cut_is_better_balanced(times: list[int], where: tuple[str, int, int]) -> None:
    kind, devices, chunks = where
    places = placement(parse_placement("v" if kind == "v" else "linear")[0], devices, chunks)
    layers = [BLOCK | {"forward_us": t, "backward_input_us": t, "backward_weight_us": 0} for t in times]
    given = LayerProfile.from_data({"format": "optpipe.layers/1", "layers": layers})
    sizes = balanced_sizes(given, places)
    assert sizes is not None
    assert sum(sizes) == len(times)
    cuts = combinations(range(1, len(times)), len(places) - 1)
    every = [tuple(b - a for a, b in pairwise((0, *cut, len(times)))) for cut in cuts]
    least = min(busiest_us(given, one, places) for one in every)
    rounding = len(places) * 2 * sum(times) / TICKS
    assert busiest_us(given, sizes, places) <= least + rounding


def test_a_balance_that_breaks_the_memory_limit_is_searched_again_within_it() -> None:
    given = profile(12, head=10, memory_bytes=6 * 1000 + 6 * 100)
    cutter, places = Cutter(given), placement("linear", 3, 1)
    for scale in (1.0, 2.0, 0.5):
        sizes = cutter.sizes(places, scale, Limits(inf))
        assert sizes == balanced_sizes(given, places, scale)
        assert sizes is not None
        assert max(sizes) * (1000 + scale * 100) <= 6600


def test_the_name_of_a_problem_ends_with_its_cut() -> None:
    """Training reads it there; a name that would be too long stays what it is."""
    search = Search(2, 4, [1], ["linear", "v"])
    for name, named in (("toy", True), ("", False), ("t" * 195, False)):
        for candidate in candidates(profile(5, head=3, name=name), search):
            assert candidate.layout is not None
            assert candidate.problem is not None
            cut = ",".join(map(str, candidate.layout.sizes)) if named else None
            assert cut_in_name(candidate.problem.name) == cut
            assert candidate.problem.name == (f"{name}, cut {cut}" if named else name)


def test_no_time_no_cut() -> None:
    cancelled = Limits(inf)
    cancelled.cancel.request()
    assert Cutter(profile(12)).sizes(placement("linear", 3, 1), 1.0, cancelled) is None


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


@pytest.mark.parametrize("limit_s", [5.0, 20.0, 60.0])
def test_every_solve_takes_as_long_as_it_is_allowed(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
    """Each answers at its own limit plus two seconds, none proves anything, and all may still win."""
    clock = Scripted(limit_s, workers=1)
    given: list[float] = []

    def latest(problem: Problem, method: str, limits: Limits, starts: list[Orders]) -> ChildResult:
        given.append(limits.time_limit_s)
        clock.wait(limits.time_limit_s + PROMISE_S)
        return ChildResult(build_schedule(problem, starts[0], 0.0, method, 0.0), "feasible", "time")

    monkeypatch.setattr(ranking, "solve_in_child", latest)
    judged = rank(candidates(profile(8, head=3), Search(2, 8, (1, 2, 4)), clock), clock)
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


def test_cutting_ends_with_the_time_for_it() -> None:
    clock = Scripted(10.0)
    found = []
    for one in candidates(profile(8, head=3), Search(2, 4, (1, 2), ("linear",)), clock):
        found.append(one)
        clock.wait(3)
    reasons = [(one.cut, one.why_not) for one in found]
    assert reasons == [("even", ""), ("balanced", ""), ("even", ""), ("balanced", "there was no time to cut it")]
