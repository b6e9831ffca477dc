"""Units of times, horizons and sizes of problems, by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from instances import uniform
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.scale import count_ops, horizon_us, time_unit_us, value_step_us, without_endless_copies
from solver.serial import serial_orders
from tests.unequal import unequal

OFFLOAD = {"bytes": 2, "offload_us": 4, "reload_us": 6}


def times(**more: float) -> Problem:
    """One stage with F of 3, B of 4.5 and W of 6 us, unless given otherwise."""
    data = uniform(1, 2, transfer_us=7).to_data()
    data["stages"][0] |= {"forward_us": 3, "backward_input_us": 4.5, "backward_weight_us": 6} | more
    return Problem.from_data(data)


@pytest.mark.parametrize(
    ("problem", "unit_us"),
    [
        (times(), Fraction(3, 2)),
        (times(backward_input_us=0.1), Fraction(1, 10)),
        (times(forward_us=0, backward_input_us=0, backward_weight_us=0), 1),
        (uniform(2, 2, transfer_us=4), 2),
        (uniform(2, 2, transfer_us=4, offload={"bytes": 1, "offload_us": 5, "reload_us": 10}), 1),
        (unequal(2, 2, transfer_us=0, microbatch_factors=[{"time": 1}, {"time": 1.5}]), Fraction(1, 2)),
    ],
)
def test_the_unit_divides_every_time_and_is_the_largest(problem: Problem, unit_us: Fraction) -> None:
    assert time_unit_us(problem) == unit_us


def test_spans_differ_by_less_than_makespans() -> None:
    """They are means over at most three devices: no two differ by less than a ninth of the unit of 10 us."""
    assert value_step_us(uniform(3, 2, transfer_us=0)) == 10
    assert value_step_us(uniform(3, 2, transfer_us=0, objective="device_span")) == pytest.approx(10 / 9)


def test_the_horizon_of_a_value() -> None:
    assert horizon_us(uniform(2, 2), 90.0) == 90
    assert horizon_us(uniform(2, 2, objective="device_span"), 90.0) == 180


@pytest.mark.parametrize(
    "problem",
    [
        uniform(2, 3, transfer_us=1000, offload=OFFLOAD),
        unequal(2, 3, transfer_us=1000, microbatch_factors=[{"time": t} for t in (1, 2, 3)]),
    ],
)
def test_one_microbatch_after_another_ends_by_the_horizon_of_no_value(problem: Problem) -> None:
    orders = serial_orders(problem)
    assert orders is not None
    assert simulate(problem, orders).makespan_us <= horizon_us(problem, float("inf"))


def test_ops_are_counted_with_those_that_may_be() -> None:
    assert count_ops(uniform(2, 3)) == 2 * 3 * 3
    assert count_ops(uniform(2, 3, offload=OFFLOAD)) == 2 * 3 * 3 + 2 * 3, "of the first stage; the last keeps its own"
    data = uniform(2, 3).to_data()
    data["stages"][0]["modes"] = [{"name": "full", "kept_bytes": 1, "recompute_us": 10}]
    assert count_ops(Problem.from_data(data)) == 2 * 3 * 3 + 3


def test_copies_beyond_the_horizon_are_cut_to_it() -> None:
    problem = uniform(2, 2, offload=OFFLOAD | {"offload_us": 10**9})
    [copy, _] = [stage.offload for stage in without_endless_copies(problem, 100.5).stages]
    assert copy is not None
    assert (copy.offload_us, copy.reload_us) == (101, 6)
    assert without_endless_copies(problem, 1e9) is problem
