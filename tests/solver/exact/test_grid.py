"""The grid of whole ticks: exact where it can be, and honest where it cannot."""

from __future__ import annotations

from optpipe.problem import Problem
from solver.exact.grid import MAX_HORIZON_TICKS, Grid
from tests.problems import uniform


def with_forward(problem: Problem, forward_us: float) -> Problem:
    data = problem.to_data()
    data["stages"][0]["forward_us"] = forward_us
    return Problem.from_data(data)


def test_whole_microseconds_are_ticks() -> None:
    grid = Grid.of(uniform(2, 2), 1000)
    assert (grid.ticks_per_us, grid.exact) == (1, True)


def test_decimal_fractions_are_exact() -> None:
    grid = Grid.of(with_forward(uniform(2, 2), 0.35), 1000)
    assert (grid.ticks_per_us, grid.exact) == (20, True)
    assert grid.ticks(0.35) == 7
    assert grid.us(7) == 0.35


def test_ops_without_length_get_a_tick_and_cost_less_than_a_step() -> None:
    problem = with_forward(uniform(2, 3), 0)
    grid = Grid.of(problem, 1000)
    assert (grid.ticks_per_us, grid.step) == (4, 4)
    assert (grid.length(0), grid.ticks(0), grid.length(10)) == (1, 0, 40)
    assert grid.bound_us(problem, 4 * 50 + 3, 60.0) == 50.0
    assert grid.bound_us(problem, 4 * 50 + 4, 60.0) == 51.0


def test_spans_get_a_finer_grid() -> None:
    assert Grid.of(uniform(3, 2, objective="device_span"), 1000).ticks_per_us == 9


def test_absurd_fractions_round_down_to_a_bounded_horizon() -> None:
    grid = Grid.of(with_forward(uniform(2, 2), 0.123456789012345), 10**9)
    assert not grid.exact
    assert grid.ticks(10**9) <= MAX_HORIZON_TICKS
    assert grid.us(grid.ticks(0.123456789012345)) <= 0.123456789012345


def test_a_span_bound_in_ticks_proves_a_value_only_if_no_fraction_lies_between() -> None:
    problem = uniform(3, 2, objective="device_span")
    grid = Grid.of(problem, 1000)
    assert grid.bound_us(problem, 90, 10.0) == 10.0
    assert grid.bound_us(problem, 89, 10.0) < 10.0
