"""The training loop: compile, agree, check if asked, then step after step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from time import perf_counter

from optpipe.compile import Program, compile_schedule
from optpipe.errors import TrainingError
from optpipe.trace import Trace
from optpipe.train.check import check_step
from optpipe.train.config import TrainingConfig
from optpipe.train.gpt import build_stages, tied_weights
from optpipe.train.hardware import own_device
from optpipe.train.launch import Launch, launched, one_core_left
from optpipe.train.model import Model
from optpipe.train.plain import tie_parameters
from optpipe.train.record import record_trace
from optpipe.train.result import CheckResult, StepReport, TrainingResult
from optpipe.train.text import Batches, standard_library_text

Report = Callable[[StepReport], None]


def train(config: TrainingConfig, report: Report | None = None) -> TrainingResult:
    """Train as the schedule says; all devices in this process, or under torchrun one process a device.

    `report` is called after each step, in the leading process alone. The result is the same in every process. Raises
    OrderError or DeadlockError if the schedule cannot run, and TrainingError if it cannot be trained as asked.
    """
    program = compile_schedule(config.schedule, reduce_gradients=config.sums_gradients)
    devices, hardware = len(program.devices), own_device(config.device)
    with one_core_left(), launched(devices, config.timeout_seconds, config.data_parallel, hardware) as launch:
        _agree(config, program, launch)
        model = Model(config, program, launch)
        batches = Batches(
            standard_library_text(),
            microbatches=program.microbatches * config.data_parallel,
            size=config.microbatch_size,
            sequence=config.shape.sequence,
            seed=config.seed,
        )
        check = _check(config, model, batches) if config.check else None
        losses, seconds, trace = _steps(config, model, batches, report if launch.rank == 0 else None)
        return TrainingResult(tuple(losses), tuple(seconds), model.parameters, launch.world, check, trace)


def _agree(config: TrainingConfig, program: Program, launch: Launch) -> None:
    """Refuse processes that were started with different schedules or options: they would wait for one another."""
    options = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "schedule"}
    found = launch.gather(options | {"program": program.digest, "device": launch.hardware.type})
    for rank, theirs in enumerate(found):
        for field, value in found[0].items():
            if theirs[field] != value:
                raise TrainingError(
                    f"{field} is {theirs[field]} on rank {rank} but {value} on rank 0. "
                    "Maybe the hosts were started with different commands or hold different files."
                )


def _check(config: TrainingConfig, model: Model, batches: Batches) -> CheckResult:
    stages = len(config.schedule.problem.stages)
    plain_modules = build_stages(config.shape, stages, config.seed, config.torch_dtype, tied=config.tied)
    for module in plain_modules:
        module.to(model.hardware)
    if config.tied:
        first, last = tied_weights(plain_modules)
        tie_parameters(plain_modules, first, last)
    return check_step(model, plain_modules, batches.batch(0))


def _steps(
    config: TrainingConfig, model: Model, batches: Batches, report: Report | None
) -> tuple[list[float], list[float], Trace | None]:
    losses, seconds, trace = [], [], None
    for step in range(config.steps):
        if step == config.trace_step:
            trace = record_trace(config, model, batches.batch(step), step)
        begin = perf_counter()
        loss = model.step(*batches.batch(step))
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} at step {step} with learning_rate {config.learning_rate}. Maybe lower it."
            )
        losses.append(loss)
        seconds.append(perf_counter() - begin)
        if report:
            report(StepReport(step, config.steps, loss, seconds[-1]))
    return losses, seconds, trace
