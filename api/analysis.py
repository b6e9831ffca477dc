"""Analysis of a schedule, and the published schedules of a problem compared."""

from __future__ import annotations

import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from api.errors import unprocessable
from optpipe.errors import MethodError
from optpipe.memory import planned_memory
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.verify import DeviceFacts, verify
from solver.methods import METHODS
from solver.scale import count_ops
from solver.solve import solve

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


class ComparedMethod(BaseModel):
    """One published schedule, or why there is none for this problem."""

    model_config = ConfigDict(extra="forbid")

    method: str
    summary: str
    why_not: str | None = Field(description="null: there is a schedule.")
    seconds: float = Field(description="What it took to make and verify.")
    value_us: float | None = None
    bound_us: float | None = None
    gap: float | None = None
    bubble: float | None = None
    peak_bytes: list[int] | None = Field(default=None, description="Of each device.")
    peak_bytes_any_timing: list[int] | None = None
    schedule: dict[str, Any] | None = Field(default=None, description="The whole schedule, where asked for.")


class Comparison(BaseModel):
    """All published schedules of a problem, the best first and those that there are not last."""

    model_config = ConfigDict(extra="forbid")

    objective: str
    methods: list[ComparedMethod]


def comparison(problem: Problem, schedules: bool) -> dict[str, Any]:
    """The comparison as plain JSON values, with the schedules themselves where asked for."""
    names = [method.name for method in METHODS.values() if method.kind == "published"]
    rows = [_row(problem, name, schedules) for name in names]
    rows.sort(key=lambda row: row.get("value_us", float("inf")))
    return {"objective": problem.objective, "methods": rows}


def _row(problem: Problem, name: str, schedules: bool) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        found: Schedule | None = solve(problem, name)
        why_not = None
    except MethodError as error:
        found, why_not = None, str(error)
    row: dict[str, Any] = {"method": name, "summary": METHODS[name].summary, "why_not": why_not}
    row["seconds"] = round(time.perf_counter() - began, 6)
    if found is None:
        return row
    figures = {name: value for name, value in found.figures().items() if name in ComparedMethod.model_fields}
    return row | figures | ({"schedule": found.to_data()} if schedules else {})
