"""Training loop: compare settings of all ranks, find a schedule, check it if asked, then train step by step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

from optpipe.compile import Program, compile_schedule
from optpipe.errors import RunFailedError, TrainingError
from optpipe.runtime.recorder import Recorder
from optpipe.runtime.weight_gradients import accumulate_in_float32
from optpipe.trace import Trace
from optpipe.train.callback import Callback
from optpipe.train.check import check_step, evaluation_loss, record_trace, warn_undeferred
from optpipe.train.checkpoint.callback import CheckpointCallback, Interrupts
from optpipe.train.config import TrainingConfig, flat
from optpipe.train.launch import Launch, launched, one_core_left, own_device
from optpipe.train.model import Model
from optpipe.train.output import (
    Callbacks,
    Evaluation,
    Report,
    StepProfiler,
    Watch,
    build_callbacks,
    following,
)
from optpipe.train.peaks import Peaks
from optpipe.train.resolve.callback import ResolveCallback
from optpipe.train.resolve.initial import initial_schedule
from optpipe.train.resolve.search import Solver
from optpipe.train.result import CheckResult, Events, RunFacts, TrainingCallback, TrainingResult
from optpipe.train.update import StepOutcome
from optpipe.train.vocabulary import refuse_settings

LOG = logging.getLogger("optpipe.train")


def train(
    config: TrainingConfig,
    report: Report | None = None,
    solver: Solver | None = None,
    callbacks: Sequence[TrainingCallback] = (),
) -> TrainingResult:
    """Train as the schedule says; all devices in this process, or under torchrun one process a device.

    `report` is called after each step in the leading process, and `callbacks` follow the run there. `solver` finds
    schedules if the config asks for that. The result is the same in every process, except for its events. If a check
    was asked for and fails, nothing is trained and the result's `check.failures` give the reasons. A signal ends the
    run between two steps, with a checkpoint if there is a folder for them; while ops are measured or a schedule is
    searched for, with KeyboardInterrupt.

    Raises OrderError or DeadlockError if the schedule cannot run, InputError or TrainingError if it cannot be trained
    as configured, and RunFailedError if a run that had begun cannot continue.
    """
    given = _compiled(config) if config.schedule else None
    devices = len(given.devices) if given else max(config.online.placed()) + 1
    hardware = own_device(config.device)
    if given is not None and given.vocabulary is not None:
        refuse_settings(config, hardware)
    with one_core_left(), launched(devices, config.timeout_seconds, config.data_parallel, hardware) as launch:
        _agree(config, given, launch)
        with Interrupts() as interrupts:
            observers = build_callbacks(config.output, report, callbacks, leads=launch.rank == 0)
            return _trained(config, given, launch, interrupts, observers, solver)


def _trained(
    config: TrainingConfig,
    given: Program | None,
    launch: Launch,
    interrupts: Interrupts,
    observers: Callbacks,
    solver: Solver | None,
) -> TrainingResult:
    """Run in the launched processes; `given` is the program of the configured schedule, if there is one."""
    events = Events(launch.rank == 0)
    first = None
    if config.online.on:
        first = initial_schedule(config, launch, solver, events, lambda: interrupts.requested is not None)
    used = replace(config, schedule=first.schedule) if first else config
    model = Model(used, given or _compiled(used), launch, task=first.task if first else None)
    if first is not None and config.schedule is None:
        model.reference = first.reference
    check = _check(model) if config.check else None
    if check is not None and check.failures:
        return TrainingResult(
            (), (), model.parameters, launch.world, check, events=tuple(events.all), schedule=model.schedule
        )
    warn_undeferred(model, first.measured if first else None)
    checkpoints = CheckpointCallback(config, model, interrupts, on_written=observers.checkpoint)
    if model.task.loader is not None:
        model.task.loader.read_for(model.stages, len(model.program.placement))
    if config.evaluate:
        model.task.batch(config.steps)  # refuses batches that do not fit before the training
    begin = checkpoints.resume()
    watch = Watch(model, config.steps, events, observers.step)
    peaks = Peaks(model, config.online.memory_margin, events, check)
    callbacks: list[Callback] = [watch, checkpoints, peaks]
    if config.evaluate_every is not None:
        callbacks.append(Evaluation(config, model, events, observers))
    if config.output.profile_steps is not None:
        callbacks.append(StepProfiler(config.output, model))
    if first and config.online.mode == "online":
        callbacks.append(ResolveCallback(config.online, model, first, solver if launch.rank == 0 else None, events))
    run = _Run(config, model, callbacks)
    evaluated = None
    facts = RunFacts(model.task.name, model.parameters, begin, config.steps, config.to_data())
    with following(observers, facts), _begun():
        try:
            run.go()
        finally:
            for callback in callbacks:
                callback.end()
        if config.evaluate and not checkpoints.stopped:
            evaluated = evaluation_loss(model, config.steps, config.evaluate)
            observers.evaluation(config.steps, evaluated)
    return TrainingResult(
        tuple(run.losses),
        tuple(run.step_seconds),
        model.parameters,
        launch.world,
        check,
        run.trace,
        first_step=begin,
        stopped=checkpoints.message if checkpoints.stopped else None,
        events=tuple(events.all),
        schedule=model.schedule,
        bubbles=tuple(watch.bubbles),
        evaluation_loss=evaluated,
        loss_terms={name: tuple(values) for name, values in run.loss_terms.items()},
        tokens_per_second=median(watch.tokens_per_second or [0.0]),
        utilization=median(watch.utilization) if watch.utilization else None,
    )


@contextmanager
def _begun() -> Iterator[None]:
    """Turn TrainingError into RunFailedError: from the first step on an error is not one of configuration."""
    try:
        yield
    except TrainingError as error:
        failed = RunFailedError(str(error))
        failed.only_here = error.only_here
        raise failed from error


def _compiled(config: TrainingConfig) -> Program:
    assert config.schedule is not None, "a schedule is given or was found"
    return compile_schedule(config.schedule, reduce_gradients=config.sums_gradients)


def _agree(config: TrainingConfig, given: Program | None, launch: Launch) -> None:
    """Raise TrainingError if processes were started with different schedules or options: they would deadlock."""
    program = given.digest if given else None
    options = dict(flat(config.to_data()))
    ranks = launch.gather(options | {"program": program, "device": launch.hardware.type})
    for rank, theirs in enumerate(ranks):
        for field, value in ranks[0].items():
            if theirs.get(field) != value:  # another release may not have the field
                raise TrainingError(
                    f"{field} is {theirs.get(field)} on rank {rank} but {value} on rank 0. "
                    "Maybe the hosts were started with different commands or hold different files."
                )


def _check(model: Model) -> CheckResult:
    """Check against the stages as the task builds them, in which a shared parameter is one tensor."""
    plain_modules = model.task.build_stages()
    for module in plain_modules:
        accumulate_in_float32(module.to(model.hardware))
    return check_step(model, plain_modules, model.task.batch(0))


class _Run:
    """Steps of a run, with the callbacks between them."""

    def __init__(self, config: TrainingConfig, model: Model, callbacks: Sequence[Callback]) -> None:
        self._config, self._model, self._callbacks = config, model, callbacks
        self._requested = [False] * len(callbacks)
        self.losses: list[float] = []
        self.loss_terms: dict[str, list[float]] = {}
        self.step_seconds: list[float] = []
        self.trace: Trace | None = None

    def go(self) -> None:
        """Run from the model's step to the last of the config, or until a callback stops the run."""
        model, task, begin = self._model, self._model.task, self._model.step_number
        recorded = self._config.recorded_step(begin)
        if recorded is not None and recorded < begin and model.launch.rank == 0:
            text = "no step is recorded: that would be step %d, and this run goes on with step %d"
            LOG.warning(text, recorded, begin)
        for step in range(begin, self._config.steps):
            self._act(step)
            if any(callback.stopped for callback in self._callbacks):
                return
            if step == recorded:
                self._settle()
                self.trace = record_trace(model, task.batch(step), step)
            recorder = self._recorder(step)
            meter = None if recorder else next((m for c in self._callbacks if (m := c.meter(step)) is not None), None)
            outcomes = model.step(task.batch(step), recorder=recorder, meter=meter, requests=self._requests)
            self._note(outcomes)
        self._act(self._config.steps)
        self._settle()

    def _act(self, step: int) -> None:
        """Call the callbacks that are due before the step or that any process has requested."""
        acting = [
            requested or callback.is_due(step)
            for requested, callback in zip(self._requested, self._callbacks, strict=True)
        ]
        if any(acting):
            self._settle()
            self._requested = [False] * len(self._callbacks)
            for callback, acts in zip(self._callbacks, acting, strict=True):
                if acts:
                    callback.on_step_boundary(step)

    def _requests(self) -> list[bool]:
        return [callback.requests() for callback in self._callbacks]

    def _recorder(self, step: int) -> Recorder | None:
        """Recorder of the step, if any. The step before is settled first, so that its waits are not recorded here."""
        recorder = next((r for c in self._callbacks if (r := c.recorder(step)) is not None), None)
        if recorder is not None:
            self._settle()
        return recorder

    def _settle(self) -> None:
        self._note(self._model.settle())

    def _note(self, outcomes: Sequence[StepOutcome]) -> None:
        """Take in the outcomes that have become known, and the requests that came with them."""
        requests = self._model.take_requests()
        if requests:
            self._requested = [before or new for before, new in zip(self._requested, requests, strict=True)]
        for outcome in outcomes:
            self.losses.append(outcome.loss)
            for name, value in outcome.loss_terms.items():
                self.loss_terms.setdefault(name, []).append(value)
            self.step_seconds.append(outcome.seconds)
            for callback in self._callbacks:
                callback.done(outcome)
