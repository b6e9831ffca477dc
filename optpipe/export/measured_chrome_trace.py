"""Chrome Trace Event JSON of a measured step, in the shape of its plan's: see `optpipe.export.chrome_trace`.

The same processes, threads and names, so that both can be read side by side. Beside the three streams a fourth thread
holds what the runtime does itself; arrows leave from its sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optpipe.export.chrome_events import FLOW_LEAD_US, Event, arrow, memory, names
from optpipe.trace.document import LANES, MeasuredAction, Trace


def measured_chrome_trace(trace: Trace) -> dict[str, Any]:
    """The trace as plain JSON values, at the trace's own times."""
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
        "traceEvents": [*_names(trace), *_actions(trace), *_memory(trace), *_flows(trace)],
    }


def _names(trace: Trace) -> Iterator[Event]:
    for d, (planned, device) in enumerate(zip(trace.schedule.problem.devices, trace.devices, strict=True)):
        labels = f"measured, peak {device.peak_bytes} bytes, process {device.process}"
        yield from names(d, planned.name or f"device {d}", labels, LANES)


def _actions(trace: Trace) -> Iterator[Event]:
    for d, device in enumerate(trace.devices):
        for action in device.actions:
            peer = {} if action.peer is None else {"peer": action.peer}
            yield {
                "ph": "X",
                "name": str(action.key),
                "cat": action.action,
                "pid": d,
                "tid": LANES.index(action.lane),
                "ts": action.start_us,
                "dur": action.duration_us,
                "args": {
                    "op": action.action,
                    "stage": action.stage,
                    "microbatch": action.microbatch,
                    "waited_us": action.start_us - action.turn_us,
                    **peer,
                },
            }


def _memory(trace: Trace) -> Iterator[Event]:
    for d, device in enumerate(trace.devices):
        yield from memory(d, device.memory.curve, 0.0)


def _flows(trace: Trace) -> Iterator[Event]:
    """An arrow for each message: from its send to the op that used it."""
    at = [stage.device for stage in trace.schedule.problem.stages]
    for number, (send, user) in enumerate(trace.messages()):
        name = "activation" if user.action == "F" else "gradient"
        leaves, arrives = _place(at[send.stage], send), _place(at[user.stage], user)
        left_us = max(send.start_us, send.end_us - FLOW_LEAD_US)
        yield from arrow(number, name, (*leaves, left_us), (*arrives, user.start_us))


def _place(device: int, action: MeasuredAction) -> tuple[int, int]:
    return device, LANES.index(action.lane)
