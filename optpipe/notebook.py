"""What the documents say of themselves; any other object may have a method `summary`."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from optpipe.display import Summary
from optpipe.layers import LayerProfile
from optpipe.plot.headline import OBJECTIVE_NAMES, title_text
from optpipe.problem import Problem
from optpipe.schedule import DevicePlan, Schedule
from optpipe.trace import Trace
from optpipe.trace.compare import compare
from optpipe.units import bytes_text, count_text, percent_text, time_text


@singledispatch
def summary_of(shown: Any) -> Summary:
    """The summary of an object: one of the documents, or whatever has a method `summary`."""
    found: Summary = shown.summary()
    return found


@summary_of.register
def _of_problem(problem: Problem) -> Summary:
    sizes = (("device", len(problem.devices)), ("stage", len(problem.stages)), ("microbatch", problem.microbatches))
    facts = [
        ("", ", ".join(count_text(count, name) for name, count in sizes)),
        ("objective", OBJECTIVE_NAMES[problem.objective]),
        ("", "may offload" if any(stage.offload for stage in problem.stages) else "nothing to offload"),
    ]
    rows = [
        (
            _device(problem, d),
            _listed(problem.stages_of[d]),
            time_text(problem.work_us[d]),
            _budget(device.memory_bytes),
        )
        for d, device in enumerate(problem.devices)
    ]
    return Summary(problem.name or "Problem", facts, ("device", "stages", "work", "memory"), rows)


@summary_of.register
def _of_schedule(schedule: Schedule) -> Summary:
    facts = [
        ("", f"{schedule.method}, {schedule.status}"),
        (OBJECTIVE_NAMES[schedule.objective], time_text(schedule.value_us)),
        ("bound", time_text(schedule.bound_us)),
        ("gap", percent_text(schedule.gap)),
        ("bubble", percent_text(schedule.bubble)),
    ]
    head = ("device", "stages", "busy", "bubble", "offloaded", "peak", "peak, any timing", "budget")
    rows = [_planned(schedule.problem, d, plan) for d, plan in enumerate(schedule.devices)]
    return Summary(title_text(schedule), facts, head, rows)


def _planned(problem: Problem, d: int, plan: DevicePlan) -> tuple[str, ...]:
    peaks = (
        bytes_text(plan.peak_bytes),
        bytes_text(plan.peak_bytes_any_timing),
        _budget(problem.devices[d].memory_bytes),
    )
    figures = (time_text(plan.busy_us), percent_text(plan.bubble), f"{len(plan.offload):,}")
    return (_device(problem, d), _listed(problem.stages_of[d]), *figures, *peaks)


@summary_of.register
def _of_trace(trace: Trace) -> Summary:
    found = compare(trace)
    facts = [
        ("step", str(trace.step)),
        ("planned", time_text(found.planned_step_us)),
        (found.basis, time_text(found.step_us)),
        ("compute took", f"{found.work_ratio:.3f} times the planned"),
    ]
    head = ("device", "bubble, planned", f"bubble, {found.basis}", "peak", "peak, planned")
    rows = [
        (
            _device(trace.schedule.problem, d),
            percent_text(figures.planned_bubble),
            percent_text(figures.bubble),
            bytes_text(device.peak_bytes),
            "-" if device.planned_peak_bytes is None else bytes_text(device.planned_peak_bytes),
        )
        for d, (figures, device) in enumerate(zip(found.devices, trace.devices, strict=True))
    ]
    return Summary(f"Measured step of {trace.source or 'a training run'}", facts, head, rows)


@summary_of.register
def _of_layers(profile: LayerProfile) -> Summary:
    facts = [
        ("", count_text(len(profile.each_layer), "layer")),
        ("microbatches of", str(profile.microbatch_size)),
        ("memory", _budget(profile.memory_bytes)),
    ]
    head = ("layer", "repeat", "forward", "backward input", "backward weight", "activation", "parameters")
    rows = [
        (
            layer.name or str(k),
            str(layer.repeat),
            *map(time_text, (layer.forward_us, layer.backward_input_us, layer.backward_weight_us)),
            *map(bytes_text, (layer.activation_bytes, layer.parameter_bytes)),
        )
        for k, layer in enumerate(profile.layers)
    ]
    return Summary(profile.name or "Layers", facts, head, rows)


def _device(problem: Problem, d: int) -> str:
    return problem.devices[d].name or f"device {d}"


def _listed(stages: Any) -> str:
    return ", ".join(map(str, stages)) if len(stages) <= 4 else f"{len(stages)} stages"


def _budget(size_bytes: int | None) -> str:
    return "no limit" if size_bytes is None else bytes_text(size_bytes)
