"""Compute orders by the number of microbatches in flight: both numbers hold, and known schedules come out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.orders import Op
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.published.in_flight import in_flight_orders
from tests.problems import problems, uniform


def test_one_f_one_b_comes_out() -> None:
    """Two devices, two in flight: device 0 starts two F, then B and F take turns."""
    orders = in_flight_orders(uniform(2, 4, transfer_us=0), 2, 0)
    names = [str(op) for op in orders.devices[0].compute if op.kind != "W"]
    assert names == ["F0.0", "F0.1", "B0.0", "F0.2", "B0.1", "F0.3", "B0.2", "B0.3"]


def test_one_in_flight_is_one_after_the_other() -> None:
    problem = uniform(3, 2, transfer_us=1)
    orders = in_flight_orders(problem, 1, 0)
    assert [str(op) for op in orders.devices[0].compute] == ["F0.0", "B0.0", "W0.0", "F0.1", "B0.1", "W0.1"]
    assert simulate(problem, orders).value_us == 2 * (6 * 10 + 4) + 2 * 10


@settings(deadline=None, max_examples=150)
@given(problems(max_microbatches=6), st.integers(1, 7), st.integers(0, 3))
def test_both_numbers_hold(problem: Problem, in_flight: int, late_weights: int) -> None:
    orders = in_flight_orders(problem, in_flight, late_weights)
    assert len(simulate(problem, orders).ops) == 3 * len(problem.stages) * problem.microbatches
    first = list(orders.devices[problem.stages[0].device].compute)
    for i in range(in_flight, problem.microbatches):
        assert first.index(Op("B", 0, i - in_flight)) < first.index(Op("F", 0, i))
    for device in orders.devices:
        pending = 0
        for op in device.compute:
            assert op.kind == "W" or pending <= late_weights
            pending += {"F": 0, "B": 1, "W": -1}[op.kind]
