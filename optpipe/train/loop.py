"""The training loop: agree, find a schedule, check if asked, then step after step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from optpipe.compile import Program, compile_schedule
from optpipe.errors import RunFailedError, TrainingError
from optpipe.runtime.recorder import Recorder
from optpipe.trace import Trace
from optpipe.train.callback import Callback
from optpipe.train.check import check_step, evaluation_loss, record_trace, tell_undeferred
from optpipe.train.checkpoint.callback import CheckpointCallback, Interrupts
from optpipe.train.config import TrainingConfig, flat
from optpipe.train.launch import Launch, launched, one_core_left, own_device
from optpipe.train.model import Model
from optpipe.train.output import Report, Watch, open_sinks
from optpipe.train.peaks import Peaks
from optpipe.train.resolve.callback import ResolveCallback
from optpipe.train.resolve.initial import initial_schedule
from optpipe.train.resolve.search import Solver
from optpipe.train.result import CheckResult, Events, TrainingResult
from optpipe.train.update import StepOutcome

LOG = logging.getLogger("optpipe.train")


def train(config: TrainingConfig, report: Report | None = None, solver: Solver | None = None) -> TrainingResult:
    """Train as the schedule says; all devices in this process, or under torchrun one process a device.

    `report` is called after each step, in the leading process alone. `solver` finds schedules where the config asks
    for that. The result is the same in every process, but for its events. Where the config asks for a check that fails,
    nothing is trained, and the result's `check.failures` say why. A signal ends the run between two steps, with a
    checkpoint where these are kept; while ops are measured or a schedule is sought, with KeyboardInterrupt.

    Raises OrderError or DeadlockError if the schedule cannot run, InputError or TrainingError if it cannot be trained
    as asked, and RunFailedError if a run that had begun cannot go on.
    """
    given = _compiled(config) if config.schedule else None
    devices = len(given.devices) if given else max(config.online.placed()) + 1
    hardware = own_device(config.device)
    with one_core_left(), launched(devices, config.timeout_seconds, config.data_parallel, hardware) as launch:
        _agree(config, given, launch)
        with Interrupts() as interrupts:
            return _trained(config, given, launch, interrupts, report, solver)


def _trained(
    config: TrainingConfig,
    given: Program | None,
    launch: Launch,
    interrupts: Interrupts,
    report: Report | None,
    solver: Solver | None,
) -> TrainingResult:
    """The run, once all processes are there; `given` is the program of the configured schedule."""
    events = Events(launch.rank == 0)
    first = None
    if config.online.on:
        first = initial_schedule(config, launch, solver, events, lambda: interrupts.requested is not None)
    used = replace(config, schedule=first.schedule) if first else config
    model = Model(used, given or _compiled(used), launch, task=first.task if first else None)
    check = _check(model) if config.check else None
    if check is not None and check.failures:
        return TrainingResult(
            (), (), model.parameters, launch.world, check, events=tuple(events.all), schedule=model.schedule
        )
    tell_undeferred(model, first.measured if first else None)
    checkpoints = CheckpointCallback(config, model, interrupts)
    begin = checkpoints.resume()
    watch = Watch(model, config.steps, events)
    peaks = Peaks(model, config.online.memory_margin, events, check)
    callbacks: list[Callback] = [watch, checkpoints, peaks]
    if first and config.online.mode == "online":
        callbacks.append(ResolveCallback(config.online, model, first, solver if launch.rank == 0 else None, events))
    run = _Run(config, model, callbacks)
    evaluated = None
    with open_sinks(config.output, model.task.name, report, leads=launch.rank == 0) as watch.report, _begun():
        try:
            run.go()
        finally:
            for callback in callbacks:
                callback.end()
        if config.evaluate and not checkpoints.stopped:
            evaluated = evaluation_loss(model, config.steps, config.evaluate)
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
    )


@contextmanager
def _begun() -> Iterator[None]:
    """Within, the run has begun: an error is no longer about how it was asked for."""
    try:
        yield
    except TrainingError as error:
        raise RunFailedError(str(error)) from error


def _compiled(config: TrainingConfig) -> Program:
    assert config.schedule is not None, "a schedule is given or has been found"
    return compile_schedule(config.schedule, reduce_gradients=config.sums_gradients)


def _agree(config: TrainingConfig, given: Program | None, launch: Launch) -> None:
    """Refuse processes that were started with different schedules or options: they would wait for one another."""
    program = given.digest if given else None
    options = dict(flat(config.to_data()))
    found = launch.gather(options | {"program": program, "device": launch.hardware.type})
    for rank, theirs in enumerate(found):
        for field, value in found[0].items():
            if theirs.get(field) != value:  # another release may not have the field
                raise TrainingError(
                    f"{field} is {theirs.get(field)} on rank {rank} but {value} on rank 0. "
                    "Maybe the hosts were started with different commands or hold different files."
                )


def _check(model: Model) -> CheckResult:
    """Against the stages as they were built: what they share is one parameter because it is one there."""
    plain_modules = model.task.build_stages()
    for module in plain_modules:
        module.to(model.hardware)
    return check_step(model, plain_modules, model.task.batch(0))


class _Run:
    """The steps of a run, and what acts between them."""

    def __init__(self, config: TrainingConfig, model: Model, callbacks: Sequence[Callback]) -> None:
        self._config, self._model, self._callbacks = config, model, callbacks
        self._asked = [False] * len(callbacks)
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self.trace: Trace | None = None

    def go(self) -> None:
        """From the model's step to the last of the run."""
        model, task, recorded = self._model, self._model.task, self._recorded_step()
        for step in range(model.step_number, self._config.steps):
            self._act(step)
            if any(callback.stopped for callback in self._callbacks):
                return
            if step == recorded:
                self._settle()
                self.trace = record_trace(model, task.batch(step), step)
            recorder = self._recorder(step)
            meter = None if recorder else next((m for b in self._callbacks if (m := b.meter(step)) is not None), None)
            self._note(model.step(task.batch(step), recorder=recorder, meter=meter, requests=self._requests))
        self._act(self._config.steps)
        self._settle()

    def _recorded_step(self) -> int | None:
        """The step to record; where it was done before this run was resumed, that is said."""
        begin, model = self._model.step_number, self._model
        step = self._config.recorded_step(begin)
        if step is not None and step < begin and model.launch.rank == 0:
            LOG.warning("no step is recorded: that would be step %d, and this run goes on with step %d", step, begin)
        return step

    def _act(self, step: int) -> None:
        """Whoever is due before the step, or is asked for by any process, acts."""
        acting = [asked or callback.is_due(step) for asked, callback in zip(self._asked, self._callbacks, strict=True)]
        if any(acting):
            self._settle()
            self._asked = [False] * len(self._callbacks)
            for callback, acts in zip(self._callbacks, acting, strict=True):
                if acts:
                    callback.on_step_boundary(step)

    def _requests(self) -> list[bool]:
        return [callback.requests() for callback in self._callbacks]

    def _recorder(self, step: int) -> Recorder | None:
        """Where a step is watched, the one before is settled: what it waits for is then its own."""
        recorder = next((found for b in self._callbacks if (found := b.recorder(step)) is not None), None)
        if recorder is not None:
            self._settle()
        return recorder

    def _settle(self) -> None:
        self._note(self._model.settle())

    def _note(self, outcomes: Sequence[StepOutcome]) -> None:
        """Steps of which all is known now."""
        requests = self._model.take_wishes()
        if requests:
            self._asked = [before or wish for before, wish in zip(self._asked, requests, strict=True)]
        for outcome in outcomes:
            self.losses.append(outcome.loss)
            self.step_seconds.append(outcome.seconds)
            for callback in self._callbacks:
                callback.done(outcome)
