"""A plan in a process of its own: cancelled, out of memory, and out of time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from optpipe.errors import InputError
from solver.layout.plan_process import FoundPlan, PlanResult, plan_in_child, plan_part
from solver.layout.request import PlanRequest
from solver.limits import Limits
from solver.process import Heartbeat

JOB = {"model": "llama-3.1-8b", "gpus": 16, "machine": "h100", "sequence": 4096, "global_batch": 32}


def planned(limits: Limits, memory_bytes: int | None = None, on_plan: Callable[[], None] = lambda: None) -> PlanResult:
    def hear(event: FoundPlan | Heartbeat) -> None:
        if isinstance(event, FoundPlan):
            on_plan()

    return plan_in_child(PlanRequest.from_data(JOB), limits, memory_bytes, hear)


def test_a_cancelled_plan_keeps_what_it_has() -> None:
    limits = Limits(60)
    result = planned(limits, on_plan=limits.cancel.request)
    assert (result.limit, result.error) == ("interrupted", None)
    assert result.plan is not None
    assert result.plan.value_us > result.plan.bound_us > 0


def test_a_plan_that_takes_too_much_memory_is_ended() -> None:
    result = planned(Limits(60), memory_bytes=2**25)
    assert (result.plan, result.limit) == (None, "memory")
    assert "before the planner held 32.0 MiB" in str(result.error)


def test_a_plan_without_time_says_so() -> None:
    result = planned(Limits(-0.9))
    assert (result.plan, result.limit) == (None, "time")
    assert "no strategy was rated" in str(result.error)


def test_strategies_with_long_schedules_are_rated_alone() -> None:
    request = PlanRequest.from_data(JOB | {"global_batch": 10**6, "fixed": {"pp": 2, "tp": 8}})
    result = plan_in_child(request, Limits(30), None, lambda _: None, max_ops=50_000)
    assert result.plan is not None
    assert (result.limit, result.plan.bubble, plan_part(result.plan.text, 1)) == (None, None, None)


def test_what_was_refused_in_the_child_is_raised_here() -> None:
    request = PlanRequest.from_data(JOB | {"fixed": {"tp": 7}})
    with pytest.raises(InputError, match="tp is 7 but must divide the 32 heads and the 16 GPUs"):
        plan_in_child(request, Limits(20), None, lambda _: None)
