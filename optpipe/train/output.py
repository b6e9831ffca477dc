"""Outputs of a run: step reports, metrics as JSON lines, TensorBoard scalars.

The bubble of a step is the share of its wall time in which this process's thread got no CPU time (`time.thread_time`):
gloo blocks while it waits for a message, and on the CPU operators and their backward run in the thread that issues
them. That costs two clock reads a step and slows no action. Time in which other programs have the core counts too. It
is not measured where devices take turns in one thread, nor on a GPU, which runs beside the host: there
`optpipe train --trace` measures.
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
"""Unit of `ru_maxrss`."""


class _Begun(NamedTuple):
    step: int
    wall_s: float
    computed_s: float


class Watch(Callback):
    """Reports steps to `report`, once it is set, and measures bubbles.

    Created when the model is at the first step of the run. `bubbles`: mean bubble of each device of the first replica,
    in every process and after the last step; empty if it is not measured.
    """

    def __init__(self, model: Model, steps: int, events: Events) -> None:
        self._model, self._steps, self._events = model, steps, events
        self._first = model.step_number
        self.report: Callable[[StepReport], None] | None = None
        self._measures = model.launch.distributed and model.hardware.type == "cpu"
        self._tokens = model.task.tokens * model.microbatches * model.launch.replicas
        self._reported = 0
        self._begun: _Begun | None = None
        self._bubbles: dict[int, float] = {}
        self._all: list[float] = []
        self.bubbles: Sequence[float] = ()

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
        if self.report is None:
            return
        new = self._events.all[self._reported :]
        self._reported += len(new)
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
        """Stop the clocks of the step under way. With post-validation its outcome comes one step later."""
        if self._begun is not None:
            step, wall_s, computed_s = self._begun
            computed, took = thread_time() - computed_s, perf_counter() - wall_s
            self._bubbles[step] = max(0.0, 1 - computed / took)
            self._all.append(self._bubbles[step])
            self._begun = None


def _peak_memory_bytes(hardware: torch.device) -> int:
    """Peak memory of this process: on its GPU, or resident."""
    if hardware.type == "cuda":
        return torch.cuda.max_memory_allocated(hardware)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_BYTES


class Metrics:
    """Writes steps to a JSON lines file. A resumed run appends after the step before its first."""

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
        """Close the file."""
        if self._file is not None:
            self._file.close()


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


def _opened_before(path: Path, step: int) -> IO[bytes]:
    """Open the file truncated to the steps before `step`: an interrupted run may have gone beyond its checkpoint."""
    kept_bytes = 0
    opened = path.open("a+b")
    opened.seek(0)
    for line in opened:
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


class Scalars:
    """Writes TensorBoard scalars to a folder. A resumed run hides what was written from its first step on.

    Raises MissingExtraError at once if TensorBoard is not installed.
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
        """Close the writer."""
        if self._writer is not None:
            self._writer.close()


Report = Callable[[StepReport], None]


@contextmanager
def open_sinks(output: OutputConfig, title: str, report: Report | None, *, leads: bool) -> Iterator[Report | None]:
    """Open the configured outputs of a run; yields a function that reports a step to all of them, None off rank 0.

    Files are closed, and the picture is drawn, however the run ends. Raises MissingExtraError if an output needs a
    package that is not installed.
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

        def report_to_all(step: StepReport) -> None:
            for sink in sinks:
                sink(step)

        yield report_to_all
