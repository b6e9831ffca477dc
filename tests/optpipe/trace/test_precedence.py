"""Re-timing agrees with an executor that shares no code with it, and the deciding path explains the end exactly."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.errors import DeadlockError, OrderError
from optpipe.orders import Op, Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.trace.precedence import deciding_path, needs_of, planned_spans, retimed
from solver.finish import finish
from tests.problems import problems, uniform
from tests.random_plans import execute, random_orders


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, Random]:
    """Random schedules of random problems, budgets aside."""
    data = draw(problems()).to_data()
    free = {"devices": [{"memory_bytes": None}] * len(data["devices"]), "host_memory_bytes": None}
    problem = Problem.from_data(data | free | {"objective": "makespan"})
    rng = Random(draw(st.integers(0, 2**16)))
    return finish(problem, random_orders(problem, rng), 0.0, "random", 0.0), rng


@settings(deadline=None)  # the simulator's kernel is compiled at its first call
@given(schedules())
def test_planned_durations_give_the_simulators_times(drawn: tuple[Schedule, Random]) -> None:
    schedule, _ = drawn
    planned = planned_spans(schedule)
    again = retimed(needs_of(schedule), {op: span.duration_us for op, span in planned.items()})
    simulation = simulate(schedule.problem, schedule.orders)
    for op, k in simulation.index.items():
        assert again[op] == pytest.approx((simulation.start_us[k], simulation.end_us[k]))


@settings(deadline=None)
@given(schedules())
def test_any_durations_give_the_times_of_an_independent_executor(drawn: tuple[Schedule, Random]) -> None:
    schedule, rng = drawn
    duration_us = {op: float(rng.randint(0, 20)) for op in planned_spans(schedule)}
    executed = execute(schedule.problem, schedule.orders, duration_us)
    assert retimed(needs_of(schedule), duration_us) == executed


@settings(deadline=None)
@given(schedules())
def test_the_deciding_path_is_unbroken_and_as_long_as_the_step(drawn: tuple[Schedule, Random]) -> None:
    schedule, rng = drawn
    needs = needs_of(schedule)
    spans = retimed(needs, {op: float(rng.randint(0, 20)) for op in needs})
    path = deciding_path(needs, spans)
    assert all(step.gap_us == step.planned_gap_us for step in path)
    length = sum(step.gap_us + spans[step.op].duration_us for step in path)
    assert length == max(span.end_us for span in spans.values())
    for before, step in pairwise(path):
        assert before.op in [need.op for need in needs[step.op]]


def test_a_plan_that_cannot_run_is_named() -> None:
    """The ops of a trace are those of its plan, whose orders nobody has judged yet."""
    plan = finish(uniform(1, 1), Orders.of_compute([[Op(kind, 0, 0) for kind in "FBW"]]), 0.0, "by hand", 0.0).to_data()
    plan["devices"][0]["compute"][0]["waits"] = ["W0.0"]
    with pytest.raises(DeadlockError, match=r"F0\.0.*B0\.0.*W0\.0|W0\.0.*F0\.0"):
        needs_of(Schedule.from_data(plan))
    plan["devices"][0]["compute"][0]["waits"] = ["O0.0"]
    with pytest.raises(OrderError, match=r"F0\.0 waits for O0\.0, which is not in the schedule"):
        needs_of(Schedule.from_data(plan))
