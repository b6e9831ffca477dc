"""Chrome Trace Event JSON of planned and measured steps, for Perfetto and chrome://tracing.

One process per device with a thread per stream, complete events for ops, a counter for memory, and flow arrows for
messages between devices. Times are microseconds, in the format ("Trace Event Format" of the Chromium project) as in the
schedule.

Planned and measured traces have the same processes, threads and names, so that they can be compared. A measured trace
has a fourth thread for the actions of the runtime; arrows start at its sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from optpipe.kinds import KINDS, STREAMS
from optpipe.memory import Curve, planned_memory
from optpipe.ops import Op
from optpipe.problem import Problem
from optpipe.schedule import Schedule, ScheduledOp
from optpipe.trace.document import LANES, MeasuredAction, Trace
from optpipe.units import bytes_text


def chrome_trace(schedule: Schedule) -> dict[str, Any]:
    """Trace of a schedule as plain JSON values.

    Events have the schedule's times, shifted by `otherData.shift_us` if some are negative, which viewers drop.
    """
    starts = (op.start_us for device in schedule.devices for _, ops in device.streams() for op in ops)
    shift_us = max(0, -min(starts, default=0))
    fields = ("method", "status", "objective", "value_us", "bound_us", "gap", "solve_seconds", "bubble")
    figures = {field: getattr(schedule, field) for field in fields}
    return {
        "displayTimeUnit": "ms",
        "otherData": {"problem": schedule.problem.name, **figures, "shift_us": shift_us},
        "traceEvents": [
            *_names(schedule),
            *_ops(schedule, shift_us),
            *(e for d in range(len(schedule.devices)) for e in memory_events(d, planned_memory(schedule, d), shift_us)),
            *_flows(schedule, shift_us),
        ],
    }


def _names(schedule: Schedule) -> Iterator[Event]:
    for d, (device, plan) in enumerate(zip(schedule.problem.devices, schedule.devices, strict=True)):
        budget = "no limit" if device.memory_bytes is None else bytes_text(device.memory_bytes)
        labels = f"peak {bytes_text(plan.peak_bytes)}, budget {budget}"
        yield from name_events(d, device.name or f"device {d}", labels, STREAMS)


def _ops(schedule: Schedule, shift_us: float) -> Iterator[Event]:
    for d, device in enumerate(schedule.devices):
        for thread, (_, ops) in enumerate(device.streams()):
            for op in ops:
                mode = {} if op.mode is None else {"mode": op.mode}
                waits = [_name(schedule.problem, Op.parse(before)) for before in op.waits]
                times_us = op.start_us + shift_us, op.end_us - op.start_us
                yield complete_event(schedule.problem, (d, thread), op.key, times_us, {"waits": waits} | mode)


def _flows(schedule: Schedule, shift_us: float) -> Iterator[Event]:
    """Arrows for activations and gradients that pass from one device to another."""
    for number, (sender, before, receiver, after) in enumerate(_transfers(schedule)):
        sent_us = before.start_us + shift_us, before.end_us + shift_us
        yield from flow_events(number, after.op, (sender, 0), sent_us, (receiver, 0), after.start_us + shift_us)


def _transfers(schedule: Schedule) -> Iterator[tuple[int, ScheduledOp, int, ScheduledOp]]:
    """Messages between devices: sender, its op, receiver, its op."""
    stages = schedule.problem.stages
    at: dict[tuple[str, int, int], tuple[int, ScheduledOp]] = {}
    for d, device in enumerate(schedule.devices):
        for op in device.compute:
            if op.op in ("W", "C") or op.op not in KINDS:  # they send nothing along the stages
                continue
            direction = "forward" if op.op == "F" else "backward"
            at[direction, op.stage, op.microbatch] = d, op
    for (direction, stage, microbatch), (sender, op) in at.items():
        following = {"forward": stage + 1, "backward": stage - 1}[direction]
        if 0 <= following < len(stages) and (direction, following, microbatch) in at:
            receiver, after = at[direction, following, microbatch]
            if receiver != sender:
                yield sender, op, receiver, after


Event = dict[str, Any]

Lane = tuple[int, int]
"""Process and thread."""

FLOW_LEAD_US = 0.001
"""Arrows start this long before an op ends: viewers attach an arrow to the op that is running at its time."""


def name_events(process: int, name: str, labels: str, threads: Sequence[str]) -> Iterator[Event]:
    """Metadata of a process: name, position, labels and threads."""
    yield _metadata("process_name", process, 0, name=name)
    yield _metadata("process_sort_index", process, 0, sort_index=process)
    yield _metadata("process_labels", process, 0, labels=labels)
    for thread, title in enumerate(threads):
        yield _metadata("thread_name", process, thread, name=title)
        yield _metadata("thread_sort_index", process, thread, sort_index=thread)


def _metadata(kind: str, process: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def memory_events(process: int, curve: Curve, shift_us: float) -> Iterator[Event]:
    """Counter events of the bytes alive."""
    for time_us, level in zip(curve.times_us.tolist(), curve.bytes.tolist(), strict=True):
        yield {
            "ph": "C",
            "name": "memory",
            "pid": process,
            "tid": 0,
            "ts": time_us + shift_us,
            "args": {"bytes": level},
        }


def complete_event(problem: Problem, lane: Lane, op: Op, times_us: tuple[float, float], args: dict[str, Any]) -> Event:
    """Event of an op or an action with its start and duration."""
    microbatch, slice_number = divmod(op.microbatch, problem.slice_count)
    of_slice = {"slice": slice_number} if problem.slice_count > 1 else {}
    return {
        "ph": "X",
        "name": _name(problem, op),
        "cat": op.kind,
        "pid": lane[0],
        "tid": lane[1],
        "ts": times_us[0],
        "dur": times_us[1],
        "args": {"op": op.kind, "stage": op.stage, "microbatch": microbatch} | of_slice | args,
    }


def _name(problem: Problem, op: Op) -> str:
    """Name of an op, with microbatch and slice where microbatches are cut: ``F0.2/1``."""
    return f"{op.kind}{op.stage}.{problem.unit_name(op.microbatch)}"


def flow_events(
    number: int, user: str, sender: Lane, sent_us: tuple[float, float], receiver: Lane, arrival_us: float
) -> Iterator[Event]:
    """Flow events of a message: from the op that takes `sent_us` (start, end) to an op of the kind `user`."""
    common = {"name": "activation" if user == "F" else "gradient", "cat": "transfer", "id": number}
    leaves_us = max(sent_us[0], sent_us[1] - FLOW_LEAD_US)
    for phase, lane, time_us in (({"ph": "s"}, sender, leaves_us), ({"ph": "f", "bp": "e"}, receiver, arrival_us)):
        yield {**phase, **common, "tid": lane[1], "pid": lane[0], "ts": time_us}


def measured_chrome_trace(trace: Trace) -> dict[str, Any]:
    """Trace of a measured step as plain JSON values."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "problem": trace.schedule.problem.name,
            "method": trace.schedule.method,
            "source": trace.source,
            "step": trace.step,
            "step_us": trace.step_us,
            "clock_error_us": trace.clock_error_us,
        },
        "traceEvents": [
            *_measured_names(trace),
            *_actions(trace),
            *(e for d, device in enumerate(trace.devices) for e in memory_events(d, device.memory.curve, 0.0)),
            *_measured_flows(trace),
        ],
    }


def _measured_names(trace: Trace) -> Iterator[Event]:
    for d, (planned, device) in enumerate(zip(trace.schedule.problem.devices, trace.devices, strict=True)):
        labels = f"measured, peak {bytes_text(device.peak_bytes)}, process {device.process}"
        yield from name_events(d, planned.name or f"device {d}", labels, LANES)


def _actions(trace: Trace) -> Iterator[Event]:
    for d, device in enumerate(trace.devices):
        for action in device.actions:
            peer = {} if action.peer is None else {"peer": action.peer}
            times_us = action.start_us, action.duration_us
            waited_us = action.start_us - action.turn_us
            args = {"waited_us": waited_us} | peer
            yield complete_event(trace.schedule.problem, _lane(d, action), action.key, times_us, args)


def _measured_flows(trace: Trace) -> Iterator[Event]:
    """An arrow for each message: from its send to the op that used it."""
    at = [stage.device for stage in trace.schedule.problem.stages]
    for number, (send, user) in enumerate(trace.messages()):
        lanes = _lane(at[send.stage], send), _lane(at[user.stage], user)
        yield from flow_events(number, user.action, lanes[0], (send.start_us, send.end_us), lanes[1], user.start_us)


def _lane(device: int, action: MeasuredAction) -> Lane:
    return device, LANES.index(action.lane)
