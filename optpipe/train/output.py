"""Outputs of a run: callbacks of the leading process, such as metrics as JSON lines, TensorBoard, Weights & Biases.

The bubble of a step is the share of its wall time in which this process's thread got no CPU time (`time.thread_time`):
gloo blocks while it waits for a message, and on the CPU operators and their backward run in the thread that issues
them. That costs two clock reads a step and slows no action. Time in which other programs have the core counts too. It
is not measured where devices take turns in one thread, nor on a GPU, which runs concurrently with the host: there
`optpipe train --trace` measures.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter, thread_time
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from optpipe.cluster.costs import ideal_seconds
from optpipe.cluster.machine import known_name, named_machines
from optpipe.compile.program import Action
from optpipe.errors import needs_extra
from optpipe.kinds import KIND
from optpipe.profile.subject import Named
from optpipe.runtime.recorder import Recorder
from optpipe.train.callback import Callback
from optpipe.train.check import evaluation_loss
from optpipe.train.config import OutputConfig, TrainingConfig
from optpipe.train.launch import hardware_name
from optpipe.train.model import Model
from optpipe.train.result import Events, RunFacts, StepReport, TrainingCallback
from optpipe.train.update import StepOutcome

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of `ru_maxrss`."""


Report = Callable[[StepReport], None]
"""Called after each step."""


class _Begun(NamedTuple):
    step: int
    wall_s: float
    computed_s: float


class Watch(Callback):
    """Reports steps to `report` and measures bubbles.

    Created when the model is at the first step of the run. `bubbles`: mean bubble of each device of the first replica,
    in every process and after the last step; empty if it is not measured. `tokens_per_second` and `utilization` have
    those of each step.
    """

    def __init__(self, model: Model, steps: int, events: Events, report: Report) -> None:
        self._model, self._steps, self._events, self._report = model, steps, events, report
        self._first = model.step_number
        self._measures = model.launch.distributed and model.hardware.type == "cpu"
        self._reported = 0
        self._begun: _Begun | None = None
        self._bubbles: dict[int, float] = {}
        self._all: list[float] = []
        self.bubbles: Sequence[float] = ()
        self.tokens_per_second: list[float] = []
        self.utilization: list[float] = []
        self._ideal_token_s = _ideal_token_seconds(model)

    def is_due(self, step: int) -> bool:
        """True after the last step, if there was one."""
        return self._measures and self._first < step == self._steps

    def on_step_boundary(self, step: int) -> None:  # noqa: ARG002
        """Gather the mean bubble of every device."""
        self.bubbles = self._model.launch.gather_pipeline(sum(self._all) / len(self._all))

    def recorder(self, step: int) -> Recorder | None:
        """Start the clocks of a step; no action is recorded."""
        if self._measures:
            self._finish()
            self._begun = _Begun(step, perf_counter(), thread_time())
        return None

    def done(self, outcome: StepOutcome) -> None:
        """Report a step."""
        self._finish()
        bubble = self._bubbles.pop(outcome.step, None)
        new = self._events.all[self._reported :]
        self._reported += len(new)
        report = StepReport(
            outcome.step,
            self._steps,
            outcome.loss,
            outcome.seconds,
            tokens=self._model.take_tokens(outcome.step),
            gradient_norm=outcome.gradient_norm,
            learning_rate=outcome.learning_rate,
            clipped=outcome.clipped,
            skipped=outcome.skipped,
            rolled_back=outcome.rolled_back,
            bubble=bubble,
            peak_memory_bytes=_peak_memory_bytes(self._model.hardware),
            events=tuple(new),
            loss_terms=outcome.loss_terms,
        )
        self.tokens_per_second.append(report.tokens_per_second)
        if self._ideal_token_s is not None:
            utilization = self._ideal_token_s * report.tokens_per_second / self._model.launch.world
            report = replace(report, utilization=utilization)
            self.utilization.append(utilization)
        self._report(report)

    def _finish(self) -> None:
        """Stop the clocks of the step in progress. With post-validation its outcome comes one step later."""
        if self._begun is not None:
            step, wall_s, computed_s = self._begun
            computed, took = thread_time() - computed_s, perf_counter() - wall_s
            self._bubbles[step] = max(0.0, 1 - computed / took)
            self._all.append(self._bubbles[step])
            self._begun = None


def _ideal_token_seconds(model: Model) -> float | None:
    """Seconds of one GPU at its peak for a token; None where model or GPU is not known, or some stages are frozen."""
    machine = known_name(hardware_name(model.hardware, ""))
    architecture = model.task.architecture
    stages = model.schedule.problem.stages if model.schedule else ()
    if machine is None or architecture is None or any(stage.backward == "none" for stage in stages):
        return None
    sequence = max(1, model.task.reference.elements // model.task.reference.rows)
    return ideal_seconds(architecture, named_machines()[machine].facts, sequence) / sequence


def _peak_memory_bytes(hardware: torch.device) -> int:
    """Peak memory of this process: on its GPU, or resident."""
    if hardware.type == "cuda":
        return torch.cuda.max_memory_allocated(hardware)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES


METHODS = ("begin", "step", "evaluation", "checkpoint", "end")


class Metrics(TrainingCallback):
    """A JSON lines file of steps. A resumed run appends after the step before its first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def step(self, report: StepReport, /) -> None:
        """Write a step. Raises OSError that names the file, as when the disk is full."""
        with self._errors_named():
            if self._file is None:
                self._file = _opened_before(self._path, report.step)
            self._file.write(json.dumps(record(report), allow_nan=False).encode() + b"\n")
            self._file.flush()

    def end(self, _error: BaseException | None = None, /) -> None:
        """Close the file. Raises as `step`."""
        with self._errors_named():
            if self._file is not None:
                self._file.close()

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def record(report: StepReport) -> dict[str, Any]:
    """Step as JSON values; numbers that are not finite are null."""
    values = asdict(report) | {"tokens_per_second": report.tokens_per_second}
    del values["steps"]
    json_values: dict[str, Any] = finite(values)
    return json_values


def finite(value: Any) -> Any:
    """Copy of a value in which numbers that are not finite are None: JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


MOST_LINE_BYTES = 2**20
"""Length from which on a line is no step; the lines of some files never end."""


def _opened_before(path: Path, step: int) -> IO[bytes]:
    """Open the file truncated to the steps before `step`: an interrupted run may have gone beyond its checkpoint."""
    if path.exists() and not path.is_file():
        return path.open("wb")  # a pipe or a device, which keeps no steps
    kept_bytes = 0
    opened = path.open("a+b")
    opened.seek(0)
    while line := opened.readline(MOST_LINE_BYTES):
        try:
            line_step = json.loads(line)["step"] if line.endswith(b"\n") else None
        except (ValueError, KeyError, TypeError):
            break
        if not isinstance(line_step, int) or line_step >= step:
            break
        kept_bytes += len(line)
    opened.truncate(kept_bytes)
    return opened


FLUSH_SECONDS = 10


class TensorBoard(TrainingCallback):
    """A folder of TensorBoard scalars. A resumed run hides what was written from its first step on.

    Raises MissingExtraError at once if TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        with needs_extra("tensorboard", "writing TensorBoard scalars"):
            from torch.utils import tensorboard
        self._make = tensorboard.SummaryWriter
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def step(self, report: StepReport, /) -> None:
        """Write a step."""
        writer = self._opened(report.step)
        for name, value in figures(report).items():
            writer.add_scalar(name, value, report.step)
        for event in report.events:
            writer.add_text("events", event.text, report.step)

    def evaluation(self, step: int, loss: float, /) -> None:
        """Write the loss of an evaluation."""
        self._opened(step).add_scalar("evaluation loss", loss, step)

    def end(self, _error: BaseException | None = None, /) -> None:
        """Close the writer."""
        if self._writer is not None:
            self._writer.close()

    def _opened(self, first_step: int) -> SummaryWriter:
        if self._writer is None:
            self._writer = self._make(str(self._folder), purge_step=first_step, flush_secs=FLUSH_SECONDS)
        return self._writer


class WeightsAndBiases(TrainingCallback):
    """Logs a run to a project of Weights & Biases, as the variables WANDB_MODE, WANDB_RUN_ID and so on say.

    Raises MissingExtraError at once if wandb is not installed.
    """

    def __init__(self, project: str) -> None:
        with needs_extra("wandb", "logging to Weights & Biases"):
            import wandb
        self._init, self._project = wandb.init, project
        self._run: Any = None

    def begin(self, run: RunFacts, /) -> None:
        """Begin a run there, with the configuration of this one; one of the same id is gone on with."""
        facts = {"model_name": run.model, "parameters": run.parameters, "first_step": run.first_step}
        self._run = self._init(project=self._project, config=dict(run.options) | facts, resume="allow")

    def step(self, report: StepReport, /) -> None:
        """Log a step."""
        self._run.log(figures(report), step=report.step)

    def evaluation(self, step: int, loss: float, /) -> None:
        """Log the loss of an evaluation, at the step before it: steps there do not go back."""
        self._run.log({"evaluation loss": loss}, step=max(0, step - 1))

    def end(self, error: BaseException | None, /) -> None:
        """Finish the run, as failed after an error."""
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)


def figures(report: StepReport) -> dict[str, float]:
    """Figures of a step by name, those that were measured; a term of the loss is `loss/` and its name."""
    values = {
        "loss": report.loss,
        **{f"loss/{name}": value for name, value in report.loss_terms.items()},
        "tokens per second": report.tokens_per_second,
        "step seconds": report.seconds,
        "learning rate": report.learning_rate,
        "gradient norm": report.gradient_norm,
        "utilization (MFU)": report.utilization,
        "bubble": report.bubble,
        "peak memory bytes": report.peak_memory_bytes,
    }
    return {name: value for name, value in values.items() if value is not None}


class _Reporting(TrainingCallback):
    """Calls a function after each step."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def step(self, report: StepReport, /) -> None:
        self._report(report)


class Callbacks(TrainingCallback):
    """Calls several callbacks in turn."""

    def __init__(self, callbacks: Sequence[TrainingCallback]) -> None:
        self._callbacks, self._begun = callbacks, ExitStack()

    def begin(self, run: RunFacts, /) -> None:
        """Begin each; those that have begun will end."""
        for callback in self._callbacks:
            self._begun.push(lambda _kind, error, _traceback, callback=callback: callback.end(error))
            callback.begin(run)

    def step(self, report: StepReport, /) -> None:
        """Report a step to each."""
        for callback in self._callbacks:
            callback.step(report)

    def evaluation(self, step: int, loss: float, /) -> None:
        """Report an evaluation to each."""
        for callback in self._callbacks:
            callback.evaluation(step, loss)

    def checkpoint(self, step: int, folder: Path, /) -> None:
        """Report a checkpoint to each."""
        for callback in self._callbacks:
            callback.checkpoint(step, folder)

    def end(self, error: BaseException | None, /) -> None:
        """End each that had begun, the last first, also where one fails."""
        self._begun.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def build_callbacks(
    output: OutputConfig, report: Report | None, given: Sequence[TrainingCallback], *, leads: bool
) -> Callbacks:
    """The callbacks of a run: those configured, `given`, and one that calls `report`; none off rank 0.

    Raises MissingExtraError if one needs a package that is not installed, InputError where the user's callable does not
    return callbacks.
    """
    if not leads:
        return Callbacks(())
    callbacks = [*given]
    if report:
        callbacks.append(_Reporting(report))
    if output.metrics:
        callbacks.append(Metrics(output.metrics))
    if output.tensorboard:
        callbacks.append(TensorBoard(output.tensorboard))
    if output.wandb:
        callbacks.append(WeightsAndBiases(output.wandb))
    if output.plot:
        from optpipe.train.run_plot import RunPlot  # matplotlib takes a moment

        callbacks.append(RunPlot(output.plot))
    if output.callback:
        callbacks += _own_callbacks(Named("callback", output.callback))
    return Callbacks(callbacks)


def _own_callbacks(build: Named) -> list[TrainingCallback]:
    returned = build()
    callbacks = list(returned) if isinstance(returned, list | tuple) else [returned]
    for callback in callbacks:
        if missing := [name for name in METHODS if not callable(getattr(callback, name, None))]:
            detail = f"returns {type(callback).__name__}, which has no method {missing[0]}."
            build.refuse("no_callback", f"{detail} Maybe inherit from optpipe.train.TrainingCallback.")
    return callbacks


@contextmanager
def following(callbacks: Callbacks, run: RunFacts) -> Iterator[None]:
    """Context of a run that callbacks follow: they begin before it and end after it, however it ends."""
    error: BaseException | None = None
    try:
        callbacks.begin(run)
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        callbacks.end(error)


class Evaluation(Callback):
    """Evaluates every so many steps: always the same batches, those of the steps that would follow the last."""

    def __init__(self, config: TrainingConfig, model: Model, events: Events, callbacks: Callbacks) -> None:
        self._config, self._model, self._events, self._callbacks = config, model, events, callbacks
        self._first = model.step_number

    def is_due(self, step: int) -> bool:
        """True every `evaluate_every` steps; after the last step the loop evaluates."""
        every = self._config.evaluate_every
        return every is not None and self._first < step < self._config.steps and step % every == 0

    def on_step_boundary(self, step: int) -> None:
        """Evaluate, in all processes together."""
        begin, count = perf_counter(), self._config.evaluate
        loss = evaluation_loss(self._model, self._config.steps, count)
        text = f"evaluation loss {loss:.4f} on {count} batch(es)"
        self._events.add(step, "evaluated", text, perf_counter() - begin)
        self._callbacks.evaluation(step, loss)


class StepProfiler(Callback):
    """Profiles steps by torch.profiler: one Chrome trace for each process, with the actions of the schedule as ranges.

    Ranges have the names of torch's schedule classes (`PP:1F0`), so `optpipe trace` reads the files.
    """

    def __init__(self, output: OutputConfig, model: Model) -> None:
        self._steps, self._folder, self._model = output.profiled_steps, output.profile_folder, model
        self._profiler: torch.profiler.profile | None = None

    def is_due(self, step: int) -> bool:
        """True before the first profiled step, and after the last."""
        return step in (self._steps.start, self._steps.stop)

    def on_step_boundary(self, step: int) -> None:
        """Start the profiler, or write what it has seen."""
        if step == self._steps.start:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self._model.hardware.type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=kinds)
            self._profiler.start()
        else:
            self.end()

    def recorder(self, step: int) -> Recorder | None:
        """Names the actions of profiled steps."""
        return _ProfilerRanges() if step in self._steps else None

    def end(self) -> None:
        """Write what was profiled, also of a run that has ended early."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._folder / f"rank-{self._model.launch.rank}.json"))


class _ProfilerRanges:
    """Recorder that names each action to the profiler."""

    def __init__(self) -> None:
        self._range: torch.profiler.record_function | None = None

    def begin(self, _device: int, action: Action, _stream: torch.Stream | None = None, /) -> None:
        letter = KIND[action.kind].torch if action.kind in KIND else None
        name = f"PP:{action.stage}{letter}{action.microbatch}" if letter else str(action)
        self._range = torch.profiler.record_function(name)
        self._range.__enter__()  # type: ignore[no-untyped-call]

    def waited(self) -> None:
        pass

    def end(self) -> None:
        assert self._range is not None, "an action has begun"
        self._range.__exit__(None, None, None)
