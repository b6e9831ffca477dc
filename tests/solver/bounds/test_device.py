"""The knapsacks are never below a choice of whole microbatches, and equal to the best one where stages are alike."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import Simulation, simulate
from solver.bounds.device import Held, Paths, Piece, longest_chain_us, most_held_us
from tests.problems import problems


@st.composite
def stocks(draw: st.DrawFn) -> Held:
    rest_us, more_us = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    return Held(Piece(rest_us + more_us, draw(st.integers(0, 6))), Piece(rest_us, draw(st.integers(0, 7))))


def best_of_whole_ones(held: list[Held], count: int, room: int) -> float:
    choices = [(w, r) for w in range(count + 1) for r in range(count + 1 - w)]
    best = 0.0
    for numbers in product(choices, repeat=len(held)):
        chosen = [
            (n, piece) for one, pair in zip(held, numbers, strict=True) for n, piece in zip(pair, one, strict=True)
        ]
        if sum(n * piece.size_bytes for n, piece in chosen) <= room:
            best = max(best, sum(n * piece.time_us for n, piece in chosen))
    return best


@given(st.lists(stocks(), min_size=1, max_size=2), st.integers(0, 4), st.integers(0, 20))
def test_never_below_whole_microbatches(held: list[Held], count: int, room: int) -> None:
    best = best_of_whole_ones(held, count, room)
    in_parts = most_held_us(held, count, room, in_parts=True)
    assert best <= most_held_us(held, count, room) <= in_parts + 1e-9


@given(stocks(), st.integers(0, 6), st.integers(0, 30))
def test_equals_whole_microbatches_of_one_stage(held: Held, count: int, room: int) -> None:
    assert most_held_us([held], count, room) == best_of_whole_ones([held], count, room)


@given(stocks(), st.integers(0, 6))
def test_without_a_limit_everything_is_held(held: Held, count: int) -> None:
    assert most_held_us([held], count, float("inf")) == count * held.whole.time_us


def alone(problem: Problem) -> Simulation:
    """The first microbatch with nothing in its way: F upwards, B downwards, W in the end."""
    one = problem.model_copy(update={"microbatches": 1, "objective": "makespan"})
    return simulate(
        one,
        Orders.of_compute(
            [Op(kind, s, 0) for kind in "FBW" for s in (stages if kind == "F" else stages[::-1])]
            for stages in problem.stages_of
        ),
    )


@given(problems())
def test_turnaround_from_any_forward_to_any_backward(problem: Problem) -> None:
    paths, simulation = Paths.of(problem), alone(problem)
    for f in range(len(problem.stages)):
        for b in range(len(problem.stages)):
            forward, backward = (simulation.index[op] for op in (Op("F", f, 0), Op("B", b, 0)))
            took_us = simulation.start_us[backward] - simulation.end_us[forward]
            assert paths.turnaround_us(f, b) == pytest.approx(took_us, abs=1e-9)


@given(problems())
def test_what_comes_before_a_stage(problem: Problem) -> None:
    paths, simulation = Paths.of(problem), alone(problem)
    first_backward_end_us = simulation.end_us[simulation.index[Op("B", 0, 0)]]
    for s in range(len(problem.stages)):
        forward, backward = (simulation.index[Op(kind, s, 0)] for kind in "FB")
        assert paths.forward_before[s] == pytest.approx(simulation.start_us[forward], abs=1e-9)
        assert paths.backward_before[s] == pytest.approx(first_backward_end_us - simulation.end_us[backward], abs=1e-9)


@given(problems())
def test_longest_chain_ends_with_the_weight_gradient_of_the_first_stage(problem: Problem) -> None:
    simulation = alone(problem)
    first_backward_end_us = simulation.end_us[simulation.index[Op("B", 0, 0)]]
    weight_us = problem.stages[0].backward_weight_us
    assert longest_chain_us(problem) == pytest.approx(first_backward_end_us + weight_us, abs=1e-9)
