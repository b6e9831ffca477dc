"""Traces of steps that never ran: a schedule's ops at times of the test's choice."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from optpipe.compile.program import SENDS, matching_receive
from optpipe.ops import Op
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.trace import Trace
from optpipe.trace.compare import Span, planned_spans

NOTHING_HELD = {"memory": {"times_us": [0.0], "bytes": [0]}, "peak_bytes": 0}


def trace_data(schedule: Schedule, spans: Mapping[Op, Span] | None = None, *, processes: bool = True) -> dict[str, Any]:
    """The document of a step whose ops ran at `spans` (None: as planned), sends right after what they send.

    With `processes` one process a device, otherwise one for all.
    """
    times = planned_spans(schedule) if spans is None else spans
    devices = []
    for d, plan in enumerate(schedule.devices):
        actions = []
        for _, ops in plan.streams():
            turn_us = min((times[op].start_us for op in ops.ops), default=0.0)
            for op in ops.ops:
                actions.append(action(op, turn_us, *times[op]))
                turn_us = times[op].end_us
                actions += [action(send, turn_us, turn_us, turn_us) for send in _sends(schedule.problem, op)]
        devices.append({"process": d if processes else 0, "actions": actions, **NOTHING_HELD})
    return {
        "format": "optpipe.trace/1",
        "source": "a test",
        "step": 3,
        "program": "0" * 64,
        "clock_error_us": 0.25,
        "schedule": schedule.to_data(),
        "devices": devices,
    }


def trace_of(schedule: Schedule, spans: Mapping[Op, Span] | None = None, *, processes: bool = True) -> Trace:
    """Trace of the document, read."""
    return Trace.from_data(trace_data(schedule, spans, processes=processes))


def action(op: Op, turn_us: float, start_us: float, end_us: float) -> dict[str, Any]:
    """An action as the document has it."""
    times = {"turn_us": min(turn_us, start_us), "start_us": start_us, "end_us": end_us}
    return {"action": op.kind, "stage": op.stage, "microbatch": op.microbatch, **times}


def crossings(problem: Problem) -> int:
    """Messages between devices in one step."""
    placement = [stage.device for stage in problem.stages]
    return 2 * problem.microbatches * sum(a != b for a, b in pairwise(placement))


def _sends(problem: Problem, op: Op) -> list[Op]:
    kind = {"F": "SEND_F", "B": "SEND_B", "BW": "SEND_B"}.get(op.kind)
    if kind not in SENDS:
        return []
    send = Op(kind, op.stage, op.microbatch)
    to = matching_receive(send).stage
    inside = 0 <= to < len(problem.stages)
    return [send] if inside and problem.stages[to].device != problem.stages[op.stage].device else []
