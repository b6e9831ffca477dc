"""From what each process recorded to one document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from optpipe.memory import curve_of
from optpipe.schedule import Schedule
from optpipe.trace.document import Trace


class ActionRow(NamedTuple):
    """An action as recorded: times in nanoseconds by a clock that all processes share, bytes alive on its device."""

    kind: str
    stage: int
    microbatch: int
    peer: int | None
    turn_ns: int
    start_ns: int
    end_ns: int
    peak_bytes: int
    after_bytes: int


class Part(NamedTuple):
    """What one process recorded: the actions of each of its devices, in the order in which they were issued."""

    process: int
    clock_error_us: float
    devices: dict[int, list[ActionRow]]

    def to_data(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self._asdict() | {"devices": {str(d): rows for d, rows in self.devices.items()}}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Self:
        """The part that `to_data` made these values of."""
        devices = {int(d): [ActionRow(*row) for row in rows] for d, rows in data["devices"].items()}
        return cls(data["process"], data["clock_error_us"], devices)


def assemble(
    parts: Sequence[Part],
    schedule: Schedule,
    *,
    program: str,
    step: int,
    planned_peak_bytes: Sequence[int],
    source: str = "",
) -> Trace:
    """The document of all parts; its fields say what the others are. Time 0 is the first start of any action.

    Raises InputError where the parts do not hold every op of the schedule once.
    """
    process = {d: part.process for part in parts for d in part.devices}
    rows = {d: rows for part in parts for d, rows in part.devices.items()}
    zero_ns = min((row.start_ns for of_device in rows.values() for row in of_device), default=0)
    devices = [
        {
            "process": process.get(d, d),
            "actions": [_action(row, zero_ns) for row in rows.get(d, [])],
            "planned_peak_bytes": planned,
            **_memory(rows.get(d, []), zero_ns),
        }
        for d, planned in enumerate(planned_peak_bytes)
    ]
    return Trace.from_data(
        {
            "format": "optpipe.trace/1",
            "source": source,
            "step": step,
            "program": program,
            "clock_error_us": max(part.clock_error_us for part in parts),
            "schedule": schedule,
            "devices": devices,
        }
    )


def _action(row: ActionRow, zero_ns: int) -> dict[str, Any]:
    times_ns = {"turn_us": row.turn_ns, "start_us": row.start_ns, "end_us": row.end_ns}
    return {
        "action": row.kind,
        "stage": row.stage,
        "microbatch": row.microbatch,
        **({} if row.peer is None else {"peer": row.peer}),
        **{name: (time_ns - zero_ns) / 1000 for name, time_ns in times_ns.items()},
    }


def _memory(rows: Sequence[ActionRow], zero_ns: int) -> dict[str, Any]:
    """Each action takes at its start what it holds at most, and leaves at its end what is alive after it."""
    start_ns, end_ns, peak, after = (
        np.array([getattr(row, field) for row in rows], np.int64)
        for field in ("start_ns", "end_ns", "peak_bytes", "after_bytes")
    )
    before = np.concatenate([[0], after])[:-1]
    effects = np.stack([peak - before, after - peak], axis=1)
    curve = curve_of((start_ns - zero_ns) / 1000, (end_ns - zero_ns) / 1000, effects)
    return {
        "memory": {"times_us": curve.times_us.tolist(), "bytes": curve.bytes.tolist()},
        "peak_bytes": int(peak.max(initial=0)),
    }
