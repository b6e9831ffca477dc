"""Events are enough and none is too many."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances.schedules import one_f_one_b
from optpipe.compile import Program, compile_schedule
from optpipe.compile.check import check_events
from optpipe.compile.events import Rules, with_events
from optpipe.errors import OrderError
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from solver.build import build_schedule
from tests.optpipe.compile.test_streams import placed_problems
from tests.optpipe.runtime.schedules import random_schedule
from tests.random_plans import random_orders
from tests.sample import examples


def checked(program: Program) -> None:
    check_events(program, Rules(program.placement, {action.key for action in program.actions()}))


@given(placed_problems(), st.integers(0, 10**6), st.data())
@settings(max_examples=examples(40))
def test_without_any_one_wait_something_begins_too_early(problem: Problem, seed: int, data: st.DataObject) -> None:
    """Without waits of a plan: the check knows rules, memory and slabs, not what else a plan asks for."""
    orders = random_orders(problem, Random(seed))
    schedule = build_schedule(problem, Orders(orders.devices, {}, orders.channels), 0.0, "random", 0.0)
    program = compile_schedule(schedule)
    places = [(d, k) for d, actions in enumerate(program.devices) for k, a in enumerate(actions) if a.waits]
    if not places:
        return
    d, k = data.draw(st.sampled_from(places))
    actions = list(program.devices[d])
    dropped = data.draw(st.sampled_from(actions[k].waits))
    actions[k] = actions[k]._replace(waits=tuple(wait for wait in actions[k].waits if wait != dropped))
    lists = [*program.devices[:d], tuple(actions), *program.devices[d + 1 :]]
    with pytest.raises(OrderError, match=r"may begin"):
        checked(replace(program, devices=tuple(lists)))


@given(placed_problems(), st.integers(0, 10**6))
@settings(max_examples=examples(30))
def test_deriving_events_again_changes_nothing(problem: Problem, seed: int) -> None:
    program = compile_schedule(random_schedule(problem, seed))
    assert with_events(program) == program


def test_only_awaited_actions_record_events() -> None:
    """Nothing waits for a release, for W, or for what is last."""
    program = compile_schedule(one_f_one_b(2, 1, moved=[(0, 0)]))
    waits = {str(action): " ".join(map(str, action.waits)) for action in program.devices[0] if action.waits}
    assert waits == {
        "SEND_F0.0->1": "F0.0",
        "O0.0@0": "F0.0",
        "RELEASE0.0": "O0.0",
        "R0.0": "PREPARE0.0",
        "RECV_B0.0<-1": "PREPARE0.0",
        "B0.0": "R0.0 RECV_B0.0",
    }
    assert {str(op) for op in program.awaited if program.placement[op.stage] == 0} == {
        *("F0.0", "O0.0", "PREPARE0.0", "R0.0", "RECV_B0.0")
    }
    assert Op("W", 0, 0) not in program.awaited
