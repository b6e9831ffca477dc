"""Outputs of a run: step reports, metrics as JSON lines, TensorBoard scalars.

Waiting is what the step took beyond the time for which the operating system let this process's thread compute
(`time.thread_time`): gloo blocks while nothing comes, and on the CPU operators and their backward run in the thread
that issues them. Two clock reads a step, and no action is slowed. Where other programs take the cores, waiting for
them counts as well. It says nothing where devices take turns in one thread, or on a GPU, which works beside the host:
there `optpipe train --trace` measures.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, thread_time
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from optpipe.errors import needs_extra
from optpipe.runtime.recorder import Recorder
from optpipe.train.callback import Callback
from optpipe.train.config import OutputConfig
from optpipe.train.model import Model
from optpipe.train.result import Events, StepReport
from optpipe.train.update import StepOutcome

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""The unit of `ru_maxrss`."""


class _Begun(NamedTuple):
    step: int
    wall_s: float
    computed_s: float


class Watch(Callback):
    """Reports steps to `report`, once there is one, and after the last gathers what each device has waited.

    Made when the model is at the step that the run begins with. `bubbles`: the mean bubble of each device of the first
    replica, in every process; empty where it is not measured.
    """

    def __init__(self, model: Model, steps: int, events: Events) -> None:
        self._model, self._steps, self._events = model, steps, events
        self._first = model.step_number
        self.report: Callable[[StepReport], None] | None = None
        self._measures = model.launch.distributed and model.hardware.type == "cpu"
        self._tokens = model.task.tokens * model.program.microbatches * model.launch.replicas
        self._told = 0
        self._begun: _Begun | None = None
        self._bubbles: dict[int, float] = {}
        self._all: list[float] = []
        self.bubbles: Sequence[float] = ()

    def is_due(self, step: int) -> bool:
        """After the last step, if there was any."""
        return self._measures and self._first < step == self._steps

    def on_step_boundary(self, step: int) -> None:  # noqa: ARG002
        """Tell all processes what this one's device has waited."""
        self.bubbles = self._model.launch.gather_pipeline(sum(self._all) / len(self._all))

    def recorder(self, step: int) -> Recorder | None:
        """A step begins; no action is watched."""
        if self._measures:
            self._finish()
            self._begun = _Begun(step, perf_counter(), thread_time())
        return None

    def done(self, outcome: StepOutcome) -> None:
        """Report a step."""
        self._finish()
        bubble = self._bubbles.pop(outcome.step, None)
        if self.report is None:
            return
        new = self._events.all[self._told :]
        self._told += len(new)
        self.report(
            StepReport(
                outcome.step,
                self._steps,
                outcome.loss,
                outcome.seconds,
                tokens=self._tokens,
                gradient_norm=outcome.gradient_norm,
                learning_rate=outcome.learning_rate,
                clipped=outcome.clipped,
                skipped=outcome.skipped,
                rolled_back=outcome.rolled_back,
                bubble=bubble,
                peak_memory_bytes=_peak_memory_bytes(self._model.hardware),
                events=tuple(new),
            )
        )

    def _finish(self) -> None:
        """The step that was begun has ended: with post-validation its outcome comes with the next."""
        if self._begun is not None:
            step, wall_s, computed_s = self._begun
            computed, took = thread_time() - computed_s, perf_counter() - wall_s
            self._bubbles[step] = max(0.0, 1 - computed / took)
            self._all.append(self._bubbles[step])
            self._begun = None


def _peak_memory_bytes(hardware: torch.device) -> int:
    """The most that this process has held: on its GPU, or in all."""
    if hardware.type == "cuda":
        return torch.cuda.max_memory_allocated(hardware)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES


class Metrics:
    """Writes the steps of a run to a file. A resumed run goes on after the step before its first; others begin anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def __call__(self, report: StepReport) -> None:
        """Write a step."""
        if self._file is None:
            self._file = _opened_before(self._path, report.step)
        self._file.write(json.dumps(record(report), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing comes any more."""
        if self._file is not None:
            self._file.close()


def record(report: StepReport) -> dict[str, Any]:
    """A step as JSON values; numbers that are not finite are null."""
    values = asdict(report) | {"tokens_per_second": report.tokens_per_second}
    del values["steps"]
    found: dict[str, Any] = finite(values)
    return found


def finite(value: Any) -> Any:
    """The same value, with None in place of each number in it that is not finite: JSON has none."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _opened_before(path: Path, step: int) -> IO[bytes]:
    """The file with what it says of earlier steps, cut off there: a run that was ended may have gone further."""
    kept = 0
    opened = path.open("a+b")
    opened.seek(0)
    for line in opened:
        found = _step_of(line)
        if found is None or found >= step:
            break
        kept += len(line)
    opened.truncate(kept)
    return opened


def _step_of(line: bytes) -> int | None:
    """The step of a whole line of ours."""
    try:
        found = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None


FLUSH_SECONDS = 10


class Scalars:
    """Writes the steps of a run to a folder. A resumed run hides what was written from its first step on.

    Raises MissingExtraError at once where TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        with needs_extra("tensorboard", "writing TensorBoard scalars"):
            from torch.utils import tensorboard
        self._make = tensorboard.SummaryWriter
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def __call__(self, report: StepReport) -> None:
        """Write a step."""
        if self._writer is None:
            self._writer = self._make(str(self._folder), purge_step=report.step, flush_secs=FLUSH_SECONDS)
        figures = {
            "loss": report.loss,
            "tokens per second": report.tokens_per_second,
            "step seconds": report.seconds,
            "learning rate": report.learning_rate,
            "gradient norm": report.gradient_norm,
            "bubble": report.bubble,
            "peak memory bytes": report.peak_memory_bytes,
        }
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(name, value, report.step)
        for event in report.events:
            self._writer.add_text("events", event.text, report.step)

    def close(self) -> None:
        """Nothing comes any more."""
        if self._writer is not None:
            self._writer.close()


Report = Callable[[StepReport], None]


@contextmanager
def open_sinks(output: OutputConfig, title: str, report: Report | None, *, leads: bool) -> Iterator[Report | None]:
    """Reports each step to `report` and into the files, in the process that leads; None in others.

    Files are whole at the end, however the run ends. Raises MissingExtraError where a file needs a package that is not
    installed.
    """
    if not leads:
        yield None
        return
    with ExitStack() as files:
        sinks: list[Report] = [report] if report else []
        if output.metrics:
            metrics = Metrics(output.metrics)
            files.callback(metrics.close)
            sinks.append(metrics)
        if output.tensorboard:
            scalars = Scalars(output.tensorboard)
            files.callback(scalars.close)
            sinks.append(scalars)
        if output.plot:
            from optpipe.train.run_plot import RunPlot  # matplotlib takes a moment

            picture = RunPlot(output.plot, title)
            files.callback(picture.draw)
            sinks.append(picture)
        yield lambda step: _tell(sinks, step)


def _tell(sinks: list[Report], step: StepReport) -> None:
    for sink in sinks:
        sink(step)
