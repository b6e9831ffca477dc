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
from optpipe.verify import verify
from solver.methods import METHODS
from solver.scale import count_entries, count_ops
from solver.solve import solve

MOST_VIOLATIONS = 1000
"""Violations listed at most; `violation_count` has the number of all."""


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
    """Recomputed figures of one device."""

    peak_bytes: int
    peak_bytes_any_timing: int | None = Field(description="null: the streams deadlock.")
    memory_bytes: int | None = Field(description="The budget; null: no limit.")
    busy_us: float
    span_us: float
    bubble: float
    memory: MemoryCurve


class Analysis(_Part):
    """Figures of a schedule recomputed by the verifier; the schedule's own figures are not used."""

    valid: bool
    objective: str
    value_us: float
    makespan_us: float
    device_span_us: float
    bubble: float = Field(description="Bubble of the busiest device.")
    host_peak_bytes: int
    devices: list[DeviceAnalysis]
    violation_count: int
    violations: list[BrokenRule] = Field(description=f"At most {MOST_VIOLATIONS}.")


def analysis(schedule: Schedule, max_ops: int) -> dict[str, Any]:
    """The analysis of a schedule as plain JSON values. Raises HttpError where it has more than `max_ops` ops."""
    ops = sum(len(stream) for device in schedule.devices for _, stream in device.streams())
    if max(ops, count_ops(schedule.problem), count_entries(schedule.problem)) > max_ops:
        raise unprocessable(
            "too_many_ops",
            f"the schedule has more than {max_ops:,} ops, devices or modes (max_ops). Maybe ask 'optpipe verify'.",
        )
    verdict = verify(schedule)
    devices = []
    for d, facts in enumerate(verdict.devices):
        levels = planned_memory(schedule, d)
        curve = {"times_us": levels.times_us.tolist(), "bytes": levels.bytes.tolist()}
        devices.append({**vars(facts), "memory_bytes": schedule.problem.devices[d].memory_bytes, "memory": curve})
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


class ComparedMethod(BaseModel):
    """One published schedule, or the reason why this problem has none."""

    model_config = ConfigDict(extra="forbid")

    method: str
    summary: str
    why_not: str | None = Field(description="null: there is a schedule.")
    seconds: float = Field(description="Time to build and verify it.")
    value_us: float | None = None
    bound_us: float | None = None
    gap: float | None = None
    bubble: float | None = None
    peak_bytes: list[int] | None = Field(default=None, description="Of each device.")
    peak_bytes_any_timing: list[int] | None = None
    schedule: dict[str, Any] | None = Field(default=None, description="The whole schedule, where asked for.")


class Comparison(BaseModel):
    """All published schedules of a problem, best first; methods without a schedule come last."""

    model_config = ConfigDict(extra="forbid")

    objective: str
    methods: list[ComparedMethod]


def comparison(problem: Problem, schedules: bool) -> dict[str, Any]:
    """The comparison as plain JSON values, with the schedules themselves where asked for."""
    rows = []
    for name, method in METHODS.items():
        if method.kind != "published":
            continue
        row: dict[str, Any] = {"method": name, "summary": method.summary, "why_not": None}
        began = time.perf_counter()
        try:
            schedule = solve(problem, name)
        except MethodError as error:
            rows.append(row | {"why_not": str(error), "seconds": round(time.perf_counter() - began, 6)})
            continue
        row["seconds"] = round(time.perf_counter() - began, 6)
        row |= {key: value for key, value in schedule.figures().items() if key in ComparedMethod.model_fields}
        rows.append(row | ({"schedule": schedule.to_data()} if schedules else {}))
    rows.sort(key=lambda row: row.get("value_us", float("inf")))
    return {"objective": problem.objective, "methods": rows}
