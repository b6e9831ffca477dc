"""Memory while training: in a few steps every storage is counted, and a peak above the plan is told.

Counting slows each operator (`MemoryMeter`), so it is done in the same few steps by all processes: the first, the
tenth, every hundredth, and the first with a new schedule. What sizes depend on, such as where a router sends its rows,
changes slowly.
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
    """Holds the peaks of metered steps against the schedule's plan and budget.

    Where the schedule is another model's they are held against what a check has measured; without one, against nothing,
    and no step is metered. A device is told of when its peak is higher than any told before.
    """

    def __init__(self, model: Model, margin: float, events: Events, check: CheckResult | None) -> None:
        self._model, self._margin, self._events, self._check = model, margin, events, check
        self._begin = model.step_number
        self._program, self._planned = model.program, self._plan()
        self._meter: MemoryMeter | None = None
        self._step = 0
        self._told: dict[int, int] = {}
        self._untold: list[str] = []

    def meter(self, step: int) -> MemoryMeter | None:
        """What counts the memory of this step; None where it is not to be counted."""
        new = self._program is not self._model.program
        if new:
            self._program, self._planned = self._model.program, self._plan()
        done = step - self._begin
        metered = self._planned is not None and (new or done == 9 or done % EVERY_STEPS == 0)
        self._meter, self._step = MemoryMeter() if metered else None, step
        return self._meter

    def requests(self) -> bool:
        """Judge the step just metered. Among many processes, those with something to tell wish to."""
        if self._meter is not None and self._planned is not None:
            for d in self._model.devices:
                peak_bytes = self._meter.peak_bytes[d]
                excess = self._planned[d].excess(d, peak_bytes, self._margin)
                if excess and peak_bytes > self._told.get(d, 0):
                    self._told[d] = peak_bytes
                    self._untold.append(f"in step {self._step} {excess}")
        self._meter = None
        if self._model.launch.world == 1:
            self._tell(self._step, self._untold)
        return bool(self._untold)

    def on_step_boundary(self, step: int) -> None:
        """Some process has something to tell."""
        texts = [text for untold in self._model.launch.gather(self._untold) for text in untold]
        self._tell(step, texts)

    def end(self) -> None:
        """What nobody acted on any more is told where it is known."""
        self._tell(self._step, self._untold)

    def _tell(self, step: int, texts: Sequence[str]) -> None:
        for text in texts:
            self._events.tell(step, "memory", text, warning=True)
        self._untold = []

    def _plan(self) -> Sequence[PlannedMemory] | None:
        planned = scheduled_memory(self._model)
        if planned is None and self._check is not None:
            return [PlannedMemory(device.planned_peak_bytes, None) for device in self._check.devices]
        return planned
