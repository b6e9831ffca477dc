"""Analysis of a schedule, the published schedules of a problem compared, and files of any kind recognised."""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api.errors import unprocessable
from optpipe.document import Document, parse_json
from optpipe.document_kinds import FORMATS, TORCH_CSV, TRANSFORMERS_CONFIG, DocumentKind, kind_of_data, kind_of_text
from optpipe.errors import InputError, MethodError
from optpipe.export.torch_csv import ACTIVATION_BYTES, OP_US, read_torch_csv
from optpipe.fields import MAX_NAME
from optpipe.memory import planned_memory
from optpipe.problem import Problem
from optpipe.schedule import Schedule, relative_gap
from optpipe.trace import Trace
from optpipe.trace.compare import Comparison as TraceComparison
from optpipe.trace.compare import compare as compare_trace
from optpipe.units import bytes_text, percent_text, time_text
from optpipe.verify import find_causes, verify
from solver.bounds import lower_bound_us
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
    idle_before_us: float = Field(description="Before its first op, from the first start on any device.")
    idle_within_us: float = Field(description="Between its ops.")
    idle_after_us: float = Field(description="After its last op, until the last end on any device.")
    memory: MemoryCurve


class OpCauses(_Part):
    """Why an op starts when it does."""

    needs: list[str] = Field(description="Ops whose ends it needs, by a rule of the model or a wait.")
    starts_after: str | None = Field(
        description="Of all that it has to follow, also on its stream or channel, the op that lets it start last; "
        "null: it starts later than it could."
    )
    delay_us: float = Field(description="Time of the transfer between the two.")


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
    ops: dict[str, OpCauses] = Field(description="By name, such as `F0.3`.")
    critical_path: list[str] = Field(
        description="Ops that each start after the one before, up to the one whose end sets the objective's value."
    )
    violation_count: int
    violations: list[BrokenRule] = Field(description=f"At most {MOST_VIOLATIONS}.")


def analysis(schedule: Schedule, max_ops: int) -> dict[str, Any]:
    """The analysis of a schedule as plain JSON values. Raises HttpError where it has more than `max_ops` ops."""
    _check_size(schedule, max_ops)
    verdict = verify(schedule)
    devices = []
    for d, facts in enumerate(verdict.devices):
        levels = planned_memory(schedule, d)
        curve = {"times_us": levels.times_us.tolist(), "bytes": levels.bytes.tolist()}
        idle_us = dict(zip(("idle_before_us", "idle_within_us", "idle_after_us"), schedule.idle_us(d), strict=True))
        budget = {"memory_bytes": schedule.problem.devices[d].memory_bytes}
        devices.append({**vars(facts), **budget, **idle_us, "memory": curve})
    return {
        "valid": verdict.ok,
        "objective": schedule.problem.objective,
        "value_us": verdict.value_us,
        "makespan_us": verdict.makespan_us,
        "device_span_us": verdict.device_span_us,
        "bubble": max(verdict.devices, key=lambda facts: facts.busy_us).bubble,
        "host_peak_bytes": verdict.host_peak_bytes,
        "devices": devices,
        **_causes(schedule),
        "violation_count": len(verdict.violations),
        "violations": [vars(violation) for violation in verdict.violations[:MOST_VIOLATIONS]],
    }


def _causes(schedule: Schedule) -> dict[str, Any]:
    causes = find_causes(schedule)
    names = [*map(str, causes.ops)]
    needs: list[list[str]] = [[] for _ in names]
    for op, before in zip(*(column.tolist() for column in causes.needs), strict=True):
        needs[op].append(names[before])
    columns = (needs, causes.starts_after.tolist(), causes.delay_us.tolist())
    ops = {
        name: {"needs": needed, "starts_after": None if k < 0 else names[k], "delay_us": delay_us}
        for name, needed, k, delay_us in zip(names, *columns, strict=True)
    }
    return {"ops": ops, "critical_path": [names[k] for k in causes.critical_path]}


def _check_size(schedule: Schedule, max_ops: int) -> None:
    ops = sum(len(stream) for device in schedule.devices for _, stream in device.streams())
    if max(ops, count_ops(schedule.problem), count_entries(schedule.problem)) > max_ops:
        raise unprocessable(
            "too_many_ops",
            f"the schedule has more than {max_ops:,} ops, devices or modes (max_ops). Maybe ask 'optpipe verify'.",
        )


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


class FileBody(Document):
    """A file as text. `problem` has the costs of a schedule CSV, which has none itself."""

    name: str = Field(max_length=MAX_NAME)
    text: str
    problem: Problem | None = None


class FoundSchedule(_Part):
    """A schedule in a file."""

    name: str
    note: str
    schedule: dict[str, Any]


class Recognized(_Part):
    """The kind of a file and the schedules in it. Problems and models' configurations are named, not checked."""

    kind: Literal["problem", "schedule", "trace", "torch-csv", "config"]
    notes: list[str] = Field(description="Sentences about what was found, assumed or left out.")
    schedules: list[FoundSchedule] = Field(description="Of a trace the plan, and the step as it was measured.")


_KINDS = {
    FORMATS["problem"]: "problem",
    FORMATS["schedule"]: "schedule",
    FORMATS["trace"]: "trace",
    TORCH_CSV: "torch-csv",
    TRANSFORMERS_CONFIG: "config",
}


def recognition(file: FileBody, max_ops: int) -> dict[str, Any]:
    """A `Recognized` as plain JSON values. Raises HttpError for a file of another kind, or one with faults."""
    try:
        kind, data = _kind(file)
        notes, schedules = _contents(kind, data, file, max_ops)
    except InputError as error:  # places within the file are none of the request: they stand in the sentences
        raise unprocessable(error.issues[0].code, f"{file.name}: {error}", "/text") from None
    return {"kind": kind, "notes": notes, "schedules": schedules}


def _kind(file: FileBody) -> tuple[str, Any]:
    """Name of the kind, and the parsed content of a file that is JSON."""
    found: DocumentKind | None
    try:
        data = parse_json(file.text)
    except InputError:
        data, found = None, kind_of_text(file.text.encode())
        if found is None and file.text.lstrip()[:1] in ("{", "["):
            raise
    else:
        is_submission = isinstance(data, dict) and "format" not in data and "problem" in data
        found = FORMATS["problem"] if is_submission else kind_of_data(data)
    if found in _KINDS:
        return _KINDS[found], data
    known = "a problem, a schedule, a measured step, a schedule CSV of torch and a model's config.json"
    if found is None:
        raise unprocessable(
            "unknown_kind",
            f"{file.name} is none of the files that are known here: {known}. Maybe its field 'format' is missing.",
            "/text",
        )
    detail = f"{file.name} is {found.name}; what opens here is {known}. {found.maybe}"
    raise unprocessable("wrong_format", detail, "/text")


def _contents(kind: str, data: Any, file: FileBody, max_ops: int) -> tuple[list[str], list[dict[str, Any]]]:
    """Notes on a file and the schedules in it."""
    if kind == "schedule":
        schedule = Schedule.from_data(data)
        _check_size(schedule, max_ops)
        return [_verdict(schedule)], [_found(file.name, schedule.method, schedule.to_data())]
    if kind == "torch-csv":
        read = read_torch_csv(file.text.encode(), "", file.problem)
        _check_size(read.schedule, max_ops)
        notes = [_verdict(read.schedule)]
        if file.problem is None:
            assumed = f"{time_text(OP_US)} for each F, B and W, and {bytes_text(ACTIVATION_BYTES)} an activation"
            notes.append(f"It has no costs: taken are {assumed}.")
        if read.overlapped:
            notes.append(f"{read.overlapped:,} pairs (OVERLAP_F_B) are read one half after the other.")
        if read.dropped:
            notes.append(f"{read.dropped:,} actions that are no compute (sends, receives, gathers) are left out.")
        bound_us = min(read.schedule.value_us, lower_bound_us(read.schedule.problem))  # broken budgets may beat it
        bounded = {"bound_us": bound_us, "gap": relative_gap(read.schedule.value_us, bound_us)}
        return notes, [_found(file.name, "orders of the file", read.schedule.to_data() | bounded)]
    if kind == "trace":
        trace = Trace.from_data(data)
        _check_size(trace.schedule, max_ops)
        compared = compare_trace(trace)
        planned = _found("plan", trace.schedule.method, trace.schedule.to_data())
        return _step_notes(compared), [planned, _found("step", compared.basis, _measured(trace, compared))]
    return [], []


def _found(name: str, note: str, schedule: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "note": note, "schedule": schedule}


def _verdict(schedule: Schedule) -> str:
    broken = verify(schedule).violations
    if not broken:
        return "The verifier finds nothing wrong."
    first = broken[0]
    return (
        f"The verifier finds {len(broken):,} broken rules. The first is {first.rule}, of {first.where}: {first.detail}"
    )


def _step_notes(compared: TraceComparison) -> list[str]:
    differs = compared.step_us / compared.planned_step_us - 1 if compared.planned_step_us else 0.0
    longer = "longer" if differs > 0 else "shorter"
    step = f"The step took {time_text(compared.step_us)}, {percent_text(abs(differs))} {longer} than planned."
    if compared.basis == "re-timed":
        step += " All devices ran in one process, so it is re-timed with the measured ops."
    fits = "" if compared.plan_fits else "Work and plan differ so much that the plan is probably of another model."
    return [step, *filter(None, [fits])]


def _measured(trace: Trace, compared: TraceComparison) -> dict[str, Any]:
    """The trace's schedule with the times, the bubbles and the peaks of the step."""
    schedule = trace.schedule
    data = schedule.to_data()
    for device, plan, figures in zip(data["devices"], schedule.devices, compared.devices, strict=True):
        for name, ops in plan.streams():
            for entry, op in zip(device.get(name, []), ops.ops, strict=True):
                entry["start_us"], entry["end_us"] = compared.spans[op].start_us, compared.spans[op].end_us
        device |= {"busy_us": figures.busy_us, "bubble": figures.bubble, "peak_bytes": figures.peak_bytes}
    # The bound is one of planned costs, and says nothing about measured ones.
    return data | {"value_us": compared.step_us, "bound_us": None, "gap": None, "method": "trace"}
