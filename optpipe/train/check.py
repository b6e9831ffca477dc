"""`--check`: the schedule's step against the plain step, and its memory against the plan. Changes no weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from optpipe.compile.memory import planned_peaks_bytes
from optpipe.runtime.memory_meter import MemoryMeter
from optpipe.runtime.messages import size_bytes
from optpipe.runtime.stage_sizes import StageSizes, measure_stage, with_measured_sizes
from optpipe.train.model import Model, moved
from optpipe.train.plain import gradient_error, plain_step
from optpipe.train.result import CheckResult, DeviceMemory
from optpipe.train.task import Batch


def check_step(model: Model, plain_modules: Sequence[nn.Module], batch: Batch) -> CheckResult:
    """Run one batch twice through the schedule and once through `plain_modules`, which have equal weights.

    These are on the hardware of the model.
    In every process of the run, with the same answer.
    """
    planned = planned_peaks(model, batch)
    runs = [_metered_run(model, batch) for _ in range(2)]
    loss = model.mean_loss(runs[1][1])
    plain_batch, autocast = moved(batch, model.hardware), model.config.model.torch_autocast
    plain_loss = plain_step(plain_modules, model.task.loss, *plain_batch, autocast)
    worst = max(gradient_errors(model, plain_modules), default=(0.0, ""))
    found = model.launch.gather({"worst": worst, "devices": _memory(model, planned, [meter for meter, _ in runs])})
    error, parameter = max(tuple(entry["worst"]) for entry in found)
    devices = [
        DeviceMemory(**device | {"live_bytes": tuple(device["live_bytes"])})
        for entry in found[: model.launch.pipeline_processes]
        for device in entry["devices"]
    ]
    return CheckResult(error, parameter, abs(loss - plain_loss) / abs(plain_loss), tuple(devices))


def planned_peaks(model: Model, batch: Batch) -> list[int]:
    """For each device, the peak of the program's order with the sizes of this model's stages, measured one by one."""
    inputs, targets = model.own_part(batch)
    first = (inputs[0], targets[0])
    mine = {s: asdict(measure_stage(stage, first, *model.messages_at(s))) for s, stage in model.stages.items()}
    sizes: dict[int, dict[str, Any]] = {}
    for entry in model.launch.gather({str(s): size for s, size in mine.items()}):
        sizes |= {int(s): size for s, size in entry.items()}
    measured = with_measured_sizes(model.problem, [StageSizes(**sizes[s]) for s in sorted(sizes)])
    return planned_peaks_bytes(model.program, measured, [size_bytes(spec) for spec in model.messages])


def gradient_errors(model: Model, plain_modules: Sequence[nn.Module]) -> list[tuple[float, str]]:
    """The gradient error of each parameter of this process's stages, with stage and name."""
    errors = []
    for s, stage in model.stages.items():
        plain = dict(plain_modules[s].named_parameters())
        for name, parameter in stage.module.named_parameters():
            assert parameter.grad is not None, "a step has been run"
            reference = plain[name].grad
            assert reference is not None, "the plain step uses every parameter"
            errors.append((gradient_error(parameter.grad, reference), f"stages[{s}].{name}"))
    return errors


def _metered_run(model: Model, batch: Batch) -> tuple[MemoryMeter, Tensor]:
    meter = MemoryMeter()
    losses = model.pipeline.run(*model.own_part(batch), meter)
    return meter, model.launch.sum(losses)


def _memory(model: Model, planned: Sequence[int], meters: Sequence[MemoryMeter]) -> list[dict[str, Any]]:
    """The fields of DeviceMemory for each device of this process."""
    return [
        {
            "peak_bytes": max(meter.peak_bytes[d] for meter in meters),
            "planned_peak_bytes": planned[d],
            "live_bytes": [meter.live_bytes[d] for meter in meters],
            "host_peak_bytes": model.pipeline.host_slabs[d].peak_bytes,
        }
        for d in model.devices
    ]
