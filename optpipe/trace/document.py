"""Trace of a training step (document `optpipe.trace/1`), assembled from the recordings of all processes.

Times are microseconds from the first start of any action in the step, by a clock common to all devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from optpipe.compile.program import SENDS, matching_receive
from optpipe.display import Displayed
from optpipe.document import Document, read_document
from optpipe.fields import Bytes, Index, Instant, TimeUs, reject
from optpipe.kinds import BACKWARDS, KINDS, covering
from optpipe.memory import Curve, memory_curve
from optpipe.ops import Op
from optpipe.schedule import Schedule

MAX_TRACE_BYTES = 512 * 2**20
"""An action takes about as many bytes as an op of a schedule, and a trace holds both."""

Lane = Literal["compute", "offload", "reload", "runtime"]
LANES: tuple[Lane, ...] = ("compute", "offload", "reload", "runtime")
"""Streams of a schedule, and a lane for other actions of the runtime: sends, receives, and so on."""


class MeasuredAction(Document):
    """A measured action: an op of the schedule, or an action of the runtime, such as SEND_F.

    `turn_us`: it was next on its device; `start_us`: its waits had ended; `end_us`: its work had ended. `peer` is the
    other device of a send or receive.
    """

    action: Annotated[str, Field(pattern=r"^[A-Z][A-Z_]{0,19}$")]
    stage: Index
    microbatch: Index
    peer: Index | None = None
    turn_us: Instant
    start_us: Instant
    end_us: Instant

    @property
    def key(self) -> Op:
        """The action as an op."""
        return Op(self.action, self.stage, self.microbatch)

    @property
    def lane(self) -> Lane:
        """Stream of an op, or the runtime's lane."""
        return self.key.stream if self.action in KINDS else "runtime"

    @property
    def duration_us(self) -> float:
        """Time from the start of its work to the end."""
        return self.end_us - self.start_us

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.turn_us <= self.start_us <= self.end_us:
            raise reject(
                "backwards",
                f"({self.key}) has turn_us {self.turn_us}, start_us {self.start_us}, end_us {self.end_us}, "
                "which must not decrease",
            )
        return self


class MemoryOverTime(Document):
    """A step function: `bytes[k]` are alive from `times_us[k]` until the next time, none before the first."""

    times_us: list[Instant]
    bytes: list[Bytes]

    @model_validator(mode="after")
    def _is_a_curve(self) -> Self:
        if len(self.times_us) != len(self.bytes):
            raise reject(
                "wrong_length", f"has {len(self.times_us)} times_us but {len(self.bytes)} bytes, one of each belongs"
            )
        if any(np.diff(np.asarray(self.times_us, np.float64)) < 0):
            raise reject("backwards", "has times_us that decrease")
        return self

    @property
    def curve(self) -> Curve:
        """The step function as arrays."""
        return Curve(np.asarray(self.times_us, np.float64), np.asarray(self.bytes, np.int64))


class MeasuredDevice(Document):
    """Measured actions of one device in issue order, and its memory.

    `process` ran it. `peak_bytes` is the measured peak. `planned_peak_bytes` is the peak of the program with measured
    sizes of the stages' ops: unlike the schedule's figure, it is of the model that ran, whatever sizes the schedule was
    planned with.
    """

    process: Index
    actions: list[MeasuredAction]
    memory: MemoryOverTime
    peak_bytes: Bytes
    planned_peak_bytes: Bytes | None = None

    def lane(self, name: Lane) -> Iterator[MeasuredAction]:
        """Actions of one lane."""
        return (action for action in self.actions if action.lane == name)

    @cached_property
    def ops(self) -> Mapping[Op, MeasuredAction]:
        """Actions that are ops of the schedule."""
        return {action.key: action for action in self.actions if action.lane != "runtime"}


class Trace(Displayed, Document):
    """A measured step with the schedule that it ran.

    `program` is the digest of the compiled program. `clock_error_us`: largest offset between times of two processes.
    `source`: free text about model and machine.
    """

    format: Literal["optpipe.trace/1"]
    source: str = Field(default="", max_length=2000)
    step: Index
    program: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    clock_error_us: TimeUs
    schedule: Schedule
    devices: list[MeasuredDevice]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a trace file. Raises InputError naming the field, the value and the limit."""
        return cls.from_data(read_document(path, MAX_TRACE_BYTES, "trace"), str(path))

    @model_validator(mode="after")
    def _ran_the_schedule(self) -> Self:
        """Every op of the schedule ran exactly once, on its device."""
        planned = self.schedule.devices
        if len(self.devices) != len(planned):
            raise reject("wrong_length", f"devices has {len(self.devices)} entries but the schedule {len(planned)}")
        for d, (device, plan) in enumerate(zip(self.devices, planned, strict=True)):
            expected = {op for _, ops in plan.streams() for op in ops.ops}
            counts = Counter(action.key for action in device.actions if action.lane != "runtime")
            for problem, ops in (
                ("lacks", expected - counts.keys()),
                ("has beyond the schedule", counts.keys() - expected),
                ("has more than once", {op for op, count in counts.items() if count > 1}),
            ):
                if ops:
                    raise reject("other_ops", f"devices[{d}].actions {problem} {min(ops)}")
        return self

    @model_validator(mode="after")
    def _actions_belong_here(self) -> Self:
        stages, microbatches = len(self.schedule.problem.stages), self.schedule.problem.units
        for d, device in enumerate(self.devices):
            for k, action in enumerate(device.actions):
                where = f"devices[{d}].actions[{k}]"
                if action.stage >= stages:
                    raise reject("unknown_stage", f"{where}.stage is {action.stage} of {stages} stages")
                if action.microbatch >= microbatches:
                    raise reject("unknown_microbatch", f"{where}.microbatch is {action.microbatch} of {microbatches}")
                if action.action in SENDS and not self._user(action):
                    raise reject("no_user", f"{where} is {action.key}, but the schedule has no op that would use it")
        return self

    @property
    def devices_ran_at_once(self) -> bool:
        """True if each device had a process of its own. In one process, devices alternate on one processor."""
        return len({device.process for device in self.devices}) == len(self.devices)

    @cached_property
    def ops(self) -> Mapping[Op, MeasuredAction]:
        """Actions of all devices that are ops of the schedule."""
        return {op: action for device in self.devices for op, action in device.ops.items()}

    def messages(self) -> Iterator[tuple[MeasuredAction, MeasuredAction]]:
        """Messages between devices: the send, and the op that used the message."""
        for device in self.devices:
            for send in device.actions:
                user = self._user(send) if send.action in SENDS else None
                if user:
                    yield send, user

    def _user(self, send: MeasuredAction) -> MeasuredAction | None:
        kind, stage, microbatch = matching_receive(send.key)
        kinds = covering("F") if kind == "RECV_F" else BACKWARDS
        users = (self.ops.get(Op(kind, stage, microbatch)) for kind in kinds)
        return next((action for action in users if action), None)

    @property
    def step_us(self) -> float:
        """Time from the first start to the last end of the schedule's ops."""
        times = self.ops.values()
        return max(t.end_us for t in times) - min(t.start_us for t in times) if times else 0.0


class ActionRow(NamedTuple):
    """A recorded action: times in nanoseconds by the common clock, bytes alive on its device."""

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
    """Recording of one process: the actions of each of its devices in issue order."""

    process: int
    clock_error_us: float
    devices: dict[int, list[ActionRow]]

    def to_data(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self._asdict() | {"devices": {str(d): rows for d, rows in self.devices.items()}}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Self:
        """Inverse of `to_data`."""
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
    """Assemble the trace of all parts; the other arguments are its fields. Time 0 is the first start of any action.

    Raises InputError unless the parts hold every op of the schedule exactly once.
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
    """Memory curve in which each action rises to its peak at its start, and falls to what it leaves at its end."""
    start_ns, end_ns, peak, after = (
        np.array([getattr(row, field) for row in rows], np.int64)
        for field in ("start_ns", "end_ns", "peak_bytes", "after_bytes")
    )
    before = np.concatenate([[0], after])[:-1]
    effects = np.stack([peak - before, after - peak], axis=1)
    curve = memory_curve((start_ns - zero_ns) / 1000, (end_ns - zero_ns) / 1000, effects)
    return {
        "memory": {"times_us": curve.times_us.tolist(), "bytes": curve.bytes.tolist()},
        "peak_bytes": int(peak.max(initial=0)),
    }
