"""Chrome Trace Event JSON: the events that planned and measured traces are made of.

A process stands for a device, a thread for one of its streams. Times are microseconds. The format:
"Trace Event Format" of the Chromium project, as read by Perfetto and chrome://tracing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from optpipe.memory import Curve

Event = dict[str, Any]

FLOW_LEAD_US = 0.001
"""Arrows leave this long before an op ends: viewers tie an arrow to the op that is running at its time."""


def names(process: int, name: str, labels: str, threads: Sequence[str]) -> Iterator[Event]:
    """Name and place of a process, what is said beside it, and its threads."""
    yield _metadata("process_name", process, 0, name=name)
    yield _metadata("process_sort_index", process, 0, sort_index=process)
    yield _metadata("process_labels", process, 0, labels=labels)
    for thread, title in enumerate(threads):
        yield _metadata("thread_name", process, thread, name=title)
        yield _metadata("thread_sort_index", process, thread, sort_index=thread)


def _metadata(kind: str, process: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def memory(process: int, curve: Curve, shift_us: float) -> Iterator[Event]:
    """A counter of the bytes alive."""
    for time_us, level in zip(curve.times_us.tolist(), curve.bytes.tolist(), strict=True):
        yield {
            "ph": "C",
            "name": "memory",
            "pid": process,
            "tid": 0,
            "ts": time_us + shift_us,
            "args": {"bytes": level},
        }


def arrow(number: int, name: str, leaves: tuple[int, int, float], arrives: tuple[int, int, float]) -> Iterator[Event]:
    """A message from the event that is running at one place to the one at the other: (process, thread, time)."""
    common = {"name": name, "cat": "transfer", "id": number}
    for phase, (process, thread, time_us) in (({"ph": "s"}, leaves), ({"ph": "f", "bp": "e"}, arrives)):
        yield {**phase, **common, "tid": thread, "pid": process, "ts": time_us}
