"""The way of one microbatch, against a simulation of it alone."""

from __future__ import annotations

import pytest
from hypothesis import given

from optpipe.orders import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import Simulation, simulate
from solver.bounds.paths import Paths, longest_chain_us
from tests.problems import problems


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
