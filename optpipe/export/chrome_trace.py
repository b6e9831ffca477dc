"""Chrome Trace Event JSON: a schedule for Perfetto and chrome://tracing.

One process a device with a thread for each stream, complete events for ops, a counter for memory, and flow arrows
where one device hands over to another. Times are microseconds, as both the format and the schedule have them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optpipe.export.chrome_events import FLOW_LEAD_US, Event, arrow, memory, names
from optpipe.memory import planned_memory
from optpipe.orders import STREAMS
from optpipe.schedule import Schedule, ScheduledOp


def write_chrome_trace(schedule: Schedule, path: Path) -> None:
    """Write the trace of `schedule` to `path`: strict JSON, the same bytes for the same schedule."""
    text = json.dumps(chrome_trace(schedule), separators=(",", ":"), allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def chrome_trace(schedule: Schedule) -> dict[str, Any]:
    """The trace as plain JSON values.

    Events carry the schedule's own times. Only where a time is negative, which viewers drop, are all times moved by
    `otherData.shift_us`.
    """
    shift_us = _shift_us(schedule)
    return {
        "displayTimeUnit": "ms",
        "otherData": {**_figures(schedule), "shift_us": shift_us},
        "traceEvents": [
            *_names(schedule),
            *_ops(schedule, shift_us),
            *_memory(schedule, shift_us),
            *_flows(schedule, shift_us),
        ],
    }


def _shift_us(schedule: Schedule) -> float:
    starts = (op.start_us for device in schedule.devices for _, ops in device.streams() for op in ops)
    return max(0, -min(starts, default=0))


def _figures(schedule: Schedule) -> dict[str, Any]:
    fields = ("method", "status", "objective", "value_us", "bound_us", "gap", "solve_seconds", "bubble")
    return {"problem": schedule.problem.name, **{field: getattr(schedule, field) for field in fields}}


def _names(schedule: Schedule) -> Iterator[Event]:
    for d, (device, plan) in enumerate(zip(schedule.problem.devices, schedule.devices, strict=True)):
        budget = "no limit" if device.memory_bytes is None else f"{device.memory_bytes} bytes"
        labels = f"peak {plan.peak_bytes} bytes, budget {budget}"
        yield from names(d, device.name or f"device {d}", labels, STREAMS)


def _ops(schedule: Schedule, shift_us: float) -> Iterator[Event]:
    for d, device in enumerate(schedule.devices):
        for thread, (_, ops) in enumerate(device.streams()):
            for op in ops:
                yield {
                    "ph": "X",
                    "name": str(op.key),
                    "cat": op.op,
                    "pid": d,
                    "tid": thread,
                    "ts": op.start_us + shift_us,
                    "dur": op.end_us - op.start_us,
                    "args": {"op": op.op, "stage": op.stage, "microbatch": op.microbatch, "waits": op.waits},
                }


def _memory(schedule: Schedule, shift_us: float) -> Iterator[Event]:
    for d in range(len(schedule.devices)):
        yield from memory(d, planned_memory(schedule, d), shift_us)


def _flows(schedule: Schedule, shift_us: float) -> Iterator[Event]:
    """Arrows for activations and gradients that pass from one device to another."""
    for number, (sender, before, receiver, after) in enumerate(_transfers(schedule)):
        name = "activation" if after.op == "F" else "gradient"
        left_us = max(before.start_us, before.end_us - FLOW_LEAD_US)
        yield from arrow(number, name, (sender, 0, left_us + shift_us), (receiver, 0, after.start_us + shift_us))


def _transfers(schedule: Schedule) -> Iterator[tuple[int, ScheduledOp, int, ScheduledOp]]:
    """Each hand-over between devices: sender, its op, receiver, its op."""
    stages = schedule.problem.stages
    at: dict[tuple[str, int, int], tuple[int, ScheduledOp]] = {}
    for d, device in enumerate(schedule.devices):
        for op in device.compute:
            direction = {"F": "forward", "B": "backward", "BW": "backward", "W": "weight"}[op.op]
            at[direction, op.stage, op.microbatch] = d, op
    for (direction, stage, microbatch), (sender, op) in at.items():
        following = {"forward": stage + 1, "backward": stage - 1}.get(direction, -1)
        if 0 <= following < len(stages) and (direction, following, microbatch) in at:
            receiver, after = at[direction, following, microbatch]
            if receiver != sender:
                yield sender, op, receiver, after
