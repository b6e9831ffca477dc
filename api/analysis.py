"""What a schedule is worth: every figure recomputed, memory over time, and each rule that it breaks."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from api.faults import unprocessable
from optpipe.memory import planned_memory
from optpipe.schedule import Schedule
from optpipe.verify import DeviceFacts, verify
from solver.size import count_ops

MOST_VIOLATIONS = 1000
"""Violations that are told; the number of all stands beside them."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class BrokenRule(_Part):
    """A rule of the model that the schedule breaks."""

    rule: str
    where: str = Field(description="The op, device or field.")
    time_us: float | None
    detail: str


class MemoryCurve(_Part):
    """A step function: `bytes[k]` from `times_us[k]` until the next time."""

    times_us: list[float]
    bytes: list[int]


class DeviceAnalysis(_Part):
    """One device, as the verifier finds it."""

    peak_bytes: int
    peak_bytes_any_timing: int | None = Field(description="null: the streams wait for each other for ever.")
    memory_bytes: int | None = Field(description="The budget; null: no limit.")
    busy_us: float
    span_us: float
    bubble: float
    memory: MemoryCurve


class Analysis(_Part):
    """A schedule as the verifier finds it, whatever it says of itself."""

    valid: bool
    objective: str
    value_us: float
    makespan_us: float
    device_span_us: float
    bubble: float = Field(description="That of the busiest device.")
    host_peak_bytes: int
    devices: list[DeviceAnalysis]
    violation_count: int
    violations: list[BrokenRule] = Field(description=f"At most {MOST_VIOLATIONS}.")


def analysis(schedule: Schedule, max_ops: int) -> dict[str, Any]:
    """The analysis of a schedule as plain JSON values. Raises ProblemError where it has more than `max_ops` ops."""
    ops = sum(len(stream) for device in schedule.devices for _, stream in device.streams())
    if max(ops, count_ops(schedule.problem)) > max_ops:
        raise unprocessable(
            "too_many_ops", f"the schedule has more than {max_ops:,} ops (max_ops). Maybe ask 'optpipe verify'."
        )
    verdict = verify(schedule)
    devices = [_device(schedule, d, facts) for d, facts in enumerate(verdict.devices)]
    return {
        "valid": verdict.ok,
        "objective": schedule.problem.objective,
        "value_us": verdict.value_us,
        "makespan_us": verdict.makespan_us,
        "device_span_us": verdict.device_span_us,
        "bubble": max(verdict.devices, key=lambda facts: facts.busy_us).bubble,
        "host_peak_bytes": verdict.host_peak_bytes,
        "devices": devices,
        "violation_count": len(verdict.violations),
        "violations": [vars(violation) for violation in verdict.violations[:MOST_VIOLATIONS]],
    }


def _device(schedule: Schedule, d: int, facts: DeviceFacts) -> dict[str, Any]:
    levels = planned_memory(schedule, d)
    curve = {"times_us": levels.times_us.tolist(), "bytes": levels.bytes.tolist()}
    return {**vars(facts), "memory_bytes": schedule.problem.devices[d].memory_bytes, "memory": curve}
