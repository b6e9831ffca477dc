"""The grid of whole ticks: exact where it can be, and honest where it cannot."""

from __future__ import annotations

from instances import uniform
from optpipe.problem import Problem
from solver.exact.ticks import TimeGrid
from solver.scale import MAX_STEPS


def with_forward(problem: Problem, forward_us: float) -> Problem:
    data = problem.to_data()
    data["stages"][0]["forward_us"] = forward_us
    return Problem.from_data(data)


def test_whole_microseconds_are_ticks() -> None:
    grid = TimeGrid.of(uniform(2, 2), 1000)
    assert (grid.ticks_per_us, grid.exact) == (1, True)


def test_decimal_fractions_are_exact() -> None:
    grid = TimeGrid.of(with_forward(uniform(2, 2), 0.35), 1000)
    assert (grid.ticks_per_us, grid.exact) == (20, True)
    assert grid.ticks(0.35) == 7
    assert grid.us(7) == 0.35


def test_a_tick_is_the_largest_time_that_divides_all() -> None:
    grid = TimeGrid.of(with_forward(uniform(2, 2, transfer_us=0), 7.5), 1000)
    assert grid.us(1) == 2.5
    assert (grid.ticks(10), grid.ticks(7.5), grid.exact) == (4, 3, True)


def test_ops_without_length_get_a_tick_and_cost_less_than_a_step() -> None:
    problem = with_forward(uniform(2, 3), 0)
    grid = TimeGrid.of(problem, 1000)
    assert (grid.ticks_per_us, grid.step) == (4, 4)
    assert (grid.length(0), grid.ticks(0), grid.length(10)) == (1, 0, 40)
    assert grid.proved_us(4 * 50 + 3) == 50.0
    assert grid.proved_us(4 * 50 + 4) == 51.0


def test_absurd_fractions_round_down_to_a_bounded_horizon() -> None:
    grid = TimeGrid.of(with_forward(uniform(2, 2), 0.123456789012345), 10**9)
    assert not grid.exact
    assert grid.ticks(10**9) <= MAX_STEPS
    assert grid.us(grid.ticks(0.123456789012345)) <= 0.123456789012345


def test_a_span_bound_is_the_next_fraction_that_spans_can_have() -> None:
    """Spans of three devices are whole, halves or thirds; on a grid of whole times they are rounded up."""
    problem = uniform(3, 2, objective="device_span")
    whole = TimeGrid.of(problem, 1000)
    assert whole.proved_us(90) == 89 + 1 / 3
    assert TimeGrid.of(problem, 1000, refinement=3).proved_us(3 * 90) == 90
    assert TimeGrid.of(problem, 1000, refinement=6).proved_us(6 * 90 - 2) == 89 + 2 / 3


def test_the_refinement_separates_a_span_from_all_below_it() -> None:
    problem = uniform(3, 2, objective="device_span")
    whole = TimeGrid.of(problem, 1000)
    for value_us, refinement in ((90, 3), (90.5, 6), (90 + 1 / 3, 9)):
        assert whole.refinement_for(value_us) == refinement
        grid = TimeGrid.of(problem, 1000, refinement)
        assert grid.proved_us(grid.bound_ticks(value_us)) == value_us


def test_a_bound_rises_to_the_next_value_that_schedules_can_have() -> None:
    spans = TimeGrid.of(uniform(3, 2, objective="device_span"), 1000)
    whole = TimeGrid.of(uniform(3, 2), 1000)
    assert (whole.raised_us(90.2), whole.raised_us(91 + 1e-10)) == (91, 91 + 1e-10)
    assert (spans.raised_us(90.4), spans.raised_us(90.5)) == (90.5, 90.5)
