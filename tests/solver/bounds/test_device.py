"""The knapsacks are never below a choice of whole units, and equal to the best one where units are alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import Simulation, simulate
from solver.bounds.device import longest_chain_us, most_held_us
from solver.bounds.unit_costs import UnitCosts
from tests.problems import problems

Stock = tuple[float, float, float, float]
"""Work of one unit before its B and after, and bytes before its B and after."""


@st.composite
def stocks(draw: st.DrawFn) -> Stock:
    rest_us, more_us = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    return rest_us + more_us, rest_us, draw(st.integers(0, 6)), draw(st.integers(0, 7))


def most_us(units: Sequence[Stock], room: float, *, in_parts: bool = False) -> float:
    return most_held_us(*np.array(units, np.float64).reshape(-1, 4).T, room, in_parts=in_parts)


def best_of_whole_ones(units: Sequence[Stock], room: int) -> float:
    best = 0.0
    for states in product(range(3), repeat=len(units)):
        size = sum((0, rest, whole)[state] for (_, _, whole, rest), state in zip(units, states, strict=True))
        if size <= room:
            best = max(best, sum((0, rest_us, us)[n] for (us, rest_us, *_), n in zip(units, states, strict=True)))
    return best


@given(st.lists(stocks(), max_size=5), st.integers(0, 20))
def test_never_below_whole_units(units: list[Stock], room: int) -> None:
    best = best_of_whole_ones(units, room)
    assert best <= most_us(units, room) + 1e-9
    assert most_us(units, room) <= most_us(units, room, in_parts=True) + 1e-9


@given(stocks(), st.integers(0, 6), st.integers(0, 30))
def test_equals_whole_units_that_are_alike(unit: Stock, count: int, room: int) -> None:
    assert most_us([unit] * count, room) == best_of_whole_ones([unit] * count, room)


@given(stocks(), st.integers(0, 6))
def test_without_a_limit_everything_is_held(unit: Stock, count: int) -> None:
    assert most_us([unit] * count, float("inf")) == count * unit[0]


def alone(problem: Problem) -> Simulation:
    """The first microbatch with nothing in its way: F upwards, B downwards, W in the end."""
    one = problem.replaced(microbatches=1, objective="makespan")
    return simulate(
        one,
        Orders.of_compute(
            [Op(kind, s, 0) for kind in "FBW" for s in (stages if kind == "F" else stages[::-1])]
            for stages in problem.stages_of
        ),
    )


@given(problems())
def test_turnaround_from_any_forward_to_any_backward(problem: Problem) -> None:
    costs, simulation = UnitCosts.of(problem), alone(problem)
    for f in range(len(problem.stages)):
        for b in range(len(problem.stages)):
            forward, backward = (simulation.index[op] for op in (Op("F", f, 0), Op("B", b, 0)))
            took_us = simulation.start_us[backward] - simulation.end_us[forward]
            assert costs.turnaround_us(f, b) == pytest.approx(took_us, abs=1e-9)


@given(problems())
def test_what_comes_before_and_after_a_stage(problem: Problem) -> None:
    costs, simulation = UnitCosts.of(problem), alone(problem)
    weight_us, ends_us = problem.stages[0].backward_weight_us, simulation.end_us
    first_backward_end_us = ends_us[simulation.index[Op("B", 0, 0)]]
    for s in range(len(problem.stages)):
        forward, backward = (simulation.index[Op(kind, s, 0)] for kind in "FB")
        assert costs.heads_us[s, 0] == pytest.approx(simulation.start_us[forward], abs=1e-9)
        tail_us = first_backward_end_us - ends_us[backward] + weight_us
        assert costs.tails_us[s, 0] == pytest.approx(tail_us, abs=1e-9)


@given(problems())
def test_longest_chain_ends_with_the_weight_gradient_of_the_first_stage(problem: Problem) -> None:
    simulation = alone(problem)
    first_backward_end_us = simulation.end_us[simulation.index[Op("B", 0, 0)]]
    weight_us = problem.stages[0].backward_weight_us
    assert longest_chain_us(problem) == pytest.approx(first_backward_end_us + weight_us, abs=1e-9)
