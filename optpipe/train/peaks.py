"""Memory peaks while training: metered in a few steps, with a warning where one exceeds plan or budget.

Metering slows each operator (`MemoryMeter`), so all ranks meter the same few steps: the second, the tenth, every
hundredth, and the first with a new schedule; in the very first, modules make their caches. Sizes that depend on the
data, such as the rows that a router sends to an expert, change slowly.
"""

from __future__ import annotations

from collections.abc import Sequence

from optpipe.compile.memory import PlannedMemory
from optpipe.runtime.recorder import MemoryMeter
from optpipe.train.callback import Callback
from optpipe.train.check import scheduled_memory
from optpipe.train.model import Model
from optpipe.train.result import CheckResult, Events

EVERY_STEPS = 100


class Peaks(Callback):
    """Compares the peaks of metered steps with the schedule's plan and budget.

    If the schedule is another model's, peaks are compared with the plan that `--check` has measured; without a check,
    and where microbatches are of other sizes in each step, no step is metered. A device is reported again only if its
    peak is higher than the last reported one.
    """

    def __init__(self, model: Model, margin: float, events: Events, check: CheckResult | None) -> None:
        self._model, self._margin, self._events, self._check = model, margin, events, check
        self._begin = model.step_number
        self._program, self._planned = model.program, self._plan()
        self._meter: MemoryMeter | None = None
        self._step = 0
        self._reported_bytes: dict[int, int] = {}
        self._unreported: list[str] = []

    def meter(self, step: int) -> MemoryMeter | None:
        """Meter of this step; None if it is not metered."""
        new = self._program is not self._model.program
        if new:
            self._program, self._planned = self._model.program, self._plan()
        done = step - self._begin
        metered = self._planned is not None and (new or done in (1, 9) or (done > 0 and done % EVERY_STEPS == 0))
        self._meter, self._step = MemoryMeter() if metered else None, step
        return self._meter

    def requests(self) -> bool:
        """Judge the step just metered. True if this rank has something to report."""
        if self._meter is not None and self._planned is not None:
            for d in self._model.devices:
                peak_bytes = self._meter.peak_bytes[d]
                excess = self._planned[d].excess(d, peak_bytes, self._margin)
                if excess and peak_bytes > self._reported_bytes.get(d, 0):
                    self._reported_bytes[d] = peak_bytes
                    self._unreported.append(f"in step {self._step} {excess}")
        self._meter = None
        if self._model.launch.world == 1:
            self._report(self._step, self._unreported)
        return bool(self._unreported)

    def on_step_boundary(self, step: int) -> None:
        """Gather the reports of all ranks: rank 0 alone writes log and metrics."""
        texts = [text for unreported in self._model.launch.gather(self._unreported) for text in unreported]
        self._report(step, texts)

    def end(self) -> None:
        """Report on this rank what came too late for a boundary."""
        self._report(self._step, self._unreported)

    def _report(self, step: int, texts: Sequence[str]) -> None:
        for text in texts:
            self._events.add(step, "memory", text, warning=True)
        self._unreported = []

    def _plan(self) -> Sequence[PlannedMemory] | None:
        planned = scheduled_memory(self._model)
        if planned is None and self._check is not None and self._model.shapes is None:
            return [PlannedMemory(device.planned_peak_bytes, None) for device in self._check.devices]
        return planned
