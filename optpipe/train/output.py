"""Each step as it is reported: what the updates say of it, with the wait of this process and its memory.

Waiting is what the step took beyond the time for which the operating system let this process's thread compute
(`time.thread_time`): gloo blocks while nothing comes, and on the CPU operators and their backward run in the thread
that issues them. Two clock reads a step, and no action is slowed. Where other programs take the cores, waiting for
them counts as well. It says nothing where devices take turns in one thread, or on a GPU, which works beside the host:
there `optpipe train --trace` measures.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from time import perf_counter, thread_time
from typing import NamedTuple

import torch

from optpipe.runtime.trace import Recorder
from optpipe.train.boundary import Boundary
from optpipe.train.model import Model
from optpipe.train.online.events import Events
from optpipe.train.result import StepReport
from optpipe.train.updates.outcome import StepOutcome

MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""The unit of `ru_maxrss`."""


class _Begun(NamedTuple):
    step: int
    wall_s: float
    computed_s: float


class Watch(Boundary):
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

    def due(self, step: int) -> bool:
        """After the last step, if there was any."""
        return self._measures and self._first < step == self._steps

    def act(self, step: int) -> None:  # noqa: ARG002
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
