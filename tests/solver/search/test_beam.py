"""Beam search over states: optima that are known, the limits, and the problems that it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest

from instances import HALF, uniform
from instances.four_by_eight import four_by_eight
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.bounds import lower_bound_us
from solver.build import within_budgets
from solver.exact.states import Dolls
from solver.limits import Limits
from solver.scale import has_exact_states
from solver.search import beam
from solver.search.beam import beam_search
from solver.solution import Solution
from tests.recomputing import recomputing


def interleaved(seed: int, microbatches: int, **changes: Any) -> Problem:
    """A problem of the family four by eight with fewer microbatches."""
    return Problem.from_data(four_by_eight(seed).to_data() | {"microbatches": microbatches} | changes)


def searched(problem: Problem, work: float, start: Solution | None = None) -> Solution:
    """The answer after so many units of work."""
    start = start or Solution(bound_us=lower_bound_us(problem))
    return beam_search(problem, Limits(workers=1, deterministic_limit=work), start, lambda _: None)


@pytest.mark.parametrize(("seed", "microbatches", "optimum"), [(21, 6, 2358), (99, 3, 1398), (99, 4, 1782)])
def test_finds_the_optimum_where_four_chunks_are_interleaved(seed: int, microbatches: int, optimum: int) -> None:
    """A bound proves the first two optima, and fewer than 200,000 states the last one."""
    problem = interleaved(seed, microbatches)
    answer = searched(problem, work=0.5)
    assert answer.orders is not None
    simulation = simulate(problem, answer.orders)
    assert simulation.value_us == answer.value_us == optimum
    assert within_budgets(problem, answer.orders, simulation)


def test_offers_only_what_is_better() -> None:
    problem, offered = interleaved(99, 3), list[Solution]()
    start = Solution(None, 1398.0, 1300.0)
    limits = Limits(workers=1, deterministic_limit=0.1)
    assert beam_search(problem, limits, start, offered.append) == start
    beam_search(problem, Limits(workers=1, deterministic_limit=0.1), Solution(), offered.append)
    values = [solution.value_us for solution in offered]
    assert values == sorted(set(values), reverse=True)
    assert values[-1] == 1398


def test_a_beam_that_leaves_nothing_out_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam, "FIRST_WIDTH", 10_000)
    widths = []
    begin = Dolls.beam

    def counted(dolls: Dolls, width: int, *rest: Any) -> bool:
        widths.append(width)
        return begin(dolls, width, *rest)

    monkeypatch.setattr(Dolls, "beam", counted)
    assert searched(interleaved(99, 2), work=1000).value_us < float("inf")
    assert widths == [10_000]


def test_leaves_alone_what_its_states_are_not_exact_for() -> None:
    """Activations that may leave, W of several lengths on a device, and modes."""
    for problem in (uniform(4, 4, budget=2, offload=HALF), four_by_eight(55), recomputing(2, 4)):
        assert not has_exact_states(problem)
        start = Solution(bound_us=lower_bound_us(problem))
        assert searched(problem, 0.1) == start


def test_stops_when_it_is_told_to() -> None:
    limits = Limits(workers=1)
    limits.cancel.request()
    start = Solution(bound_us=1.0)
    assert beam_search(interleaved(99, 4), limits, start, lambda _: None) == start
