"""Bounds from states of parts: those of the whole where two devices decide, and never more."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from optpipe.problem import Problem
from solver.bounds import lower_bound_us
from solver.exact.relaxation import parts, projected
from solver.exact.state_bound import state_bound
from solver.exact.states import Dolls
from solver.limits import Limits
from solver.solution import Solution
from tests.solver.exact.test_states import pipeline, random_pipeline


def least_ticks(problem: Problem, kept: Sequence[int] | None = None) -> list[int | None]:
    """Least ticks of the last 1, 2, ... microbatches by states of the stages `kept`, or of all; None: not reached."""
    part = [] if kept is None else [projected(problem, kept)]
    limits = Limits(workers=1, deterministic_limit=0.5)
    dolls = Dolls(part[0], limits, problem, kept or ()) if part else Dolls(problem, limits)
    least: list[int | None] = []
    for count in range(1, problem.microbatches + 1):
        for _ in dolls._climb(count, 10**15, 1.0):
            pass
        least.append(dolls.least[count] if dolls.is_reached else None)
    return least


@pytest.mark.parametrize(("p", "m", "room", "least"), [(3, 8, 3, 68), (4, 8, 3, 86), (5, 8, 3, 104), (8, 16, 5, 164)])
def test_both_ends_of_a_v_say_more_than_chains(p: int, m: int, room: int, least: int) -> None:
    """The optimum in the first three; in the last, 158 by chains, 169 is the best value known."""
    assert least_ticks(pipeline(p, m, room, along_v=True), [0, p - 1, p, 2 * p - 1])[-1] == least


def test_reports_what_parts_prove_and_then_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solver.exact.state_bound.FEW_OPS", 0)
    problem = pipeline(5, 8, 3, along_v=True)
    start = Solution(None, 120.0, lower_bound_us(problem))
    reported: list[Solution] = []
    limits = Limits(workers=1, deterministic_limit=2.0)
    answer = state_bound(problem, limits, start, reported.append)
    assert start.bound_us == 98
    bounds = [found.bound_us for found in reported if found.orders is None]
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == 104
    assert answer == reported[-1]
    assert answer.bound_us == answer.value_us == 104


def test_no_part_says_more_than_the_whole() -> None:
    """Nothing leaves, for then the states of the whole are a relaxation as well."""
    compared = 0
    for seed in range(40):
        data = random_pipeline(Random(seed)).to_data()
        for stage in data["stages"]:
            stage.pop("offload", None)
        problem = Problem.from_data(data)
        whole = least_ticks(problem)
        for kept in parts(problem, problem.stages[0].device):
            for of_part, of_whole in zip(least_ticks(problem, kept), whole, strict=True):
                if of_part is not None and of_whole is not None:
                    compared += 1
                    assert of_part <= of_whole, (seed, kept)
    assert compared > 50
