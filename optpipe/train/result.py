"""Results of training, what happens meanwhile, and the protocol of callbacks that follow a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from optpipe.display import Displayed, Summary
from optpipe.schedule import Schedule
from optpipe.trace import Trace
from optpipe.units import bytes_text, time_text

LOG = logging.getLogger("optpipe.train.resolve")

EventKind = Literal["measured", "timed", "solving", "found", "swapped", "kept", "back", "memory", "evaluated"]


@dataclass(frozen=True)
class OnlineEvent:
    """Event before step `step`, as text, with the seconds of training that it took.

    `measured`: ops were measured before the first step. `timed`: ops were timed in steps. `solving`: a search began.
    `found`: it ended. `swapped`, `kept`: its schedule was taken or not. `back`: the one before is in use again.
    `memory`: a device held more than planned. `evaluated`: batches were evaluated.
    """

    step: int
    kind: EventKind
    text: str
    seconds: float = 0.0


class Events:
    """Events of one process so far; the leading process also logs them."""

    def __init__(self, leads: bool) -> None:
        self._leads = leads
        self.all: list[OnlineEvent] = []

    def add(self, step: int, kind: EventKind, text: str, seconds: float = 0.0, *, warning: bool = False) -> None:
        """Append an event. The text of a warning names its step itself."""
        self.all.append(OnlineEvent(step, kind, text, seconds))
        if self._leads:
            if warning:
                LOG.warning("%s", text)
            else:
                LOG.info("before step %d: %s", step, text)


@dataclass(frozen=True)
class StepReport:
    """Report of a step, counted from 0 of `steps`. `loss`: mean over the batch, of the GPT in nats a byte.

    `tokens`: of all replicas. `seconds`: duration in the leading process. `gradient_norm` to `rolled_back`: as in
    `StepOutcome`. `bubble`: share of the step in which the leading process's device waited; None where devices take
    turns in one process or run apart from the host (CUDA). `peak_memory_bytes`: most that the leading process has
    held, on its GPU or resident. `events`: events since the last report. `loss_terms`: the terms of a loss that has
    several, by name; their sum is the loss. `utilization`: model FLOP/s utilization (MFU) of all GPUs together; None
    where the model's operations or the peak of its GPUs are not known.
    """

    step: int
    steps: int
    loss: float
    seconds: float
    tokens: int = 0
    gradient_norm: float = 0.0
    learning_rate: float = 0.0
    clipped: bool = False
    skipped: bool = False
    rolled_back: bool = False
    bubble: float | None = None
    peak_memory_bytes: int = 0
    events: tuple[OnlineEvent, ...] = ()
    loss_terms: Mapping[str, float] = field(default_factory=dict)
    utilization: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, all replicas together."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class RunFacts:
    """The run that callbacks follow.

    `model`: name for people. `first_step`: above 0 if a checkpoint was resumed. `options`: the configuration as JSON
    values.
    """

    model: str
    parameters: int
    first_step: int
    steps: int
    options: Mapping[str, Any]


class TrainingCallback:
    """Protocol of what follows a run in its leading process (rank 0). A subclass overrides what it needs.

    An error that a method raises ends the run; `end` is called all the same, for each callback that had begun.
    """

    def begin(self, _run: RunFacts, /) -> None:
        """Called before the first step."""

    def step(self, _report: StepReport, /) -> None:
        """Called when the outcome of a step is known: with post-validation after the next one."""

    def evaluation(self, _step: int, _loss: float, /) -> None:
        """Called with the mean loss of the evaluation batches, before this step or after the last."""

    def checkpoint(self, _step: int, _folder: Path, /) -> None:
        """Called when the checkpoint of the state before this step is whole."""

    def end(self, _error: BaseException | None, /) -> None:
        """Called after the last step, or with the error that ends the run; writes what is to be written."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device in a checked step.

    `peak_bytes`: the most that was alive at once (activations, workspace, received messages; not weights, gradients,
    optimizer state). `planned_peak_bytes`: the same by the program's order with the sizes of single ops measured
    alone, the largest of all microbatches. `live_bytes`: what each of two steps, one after the other, left alive beyond
    what was there before it: the first may fill caches, the second leaves 0 unless something leaks. `host_peak_bytes`:
    the most that its offloads held on the host.

    `schedule_peak_bytes`: the peak with the sizes that the schedule was solved for, and `budget_bytes` its budget with
    the messages; None where the schedule is another model's, and where there is no budget.
    """

    peak_bytes: int
    planned_peak_bytes: int
    live_bytes: tuple[int, ...]
    host_peak_bytes: int
    schedule_peak_bytes: int | None = None
    budget_bytes: int | None = None

    @property
    def left_bytes(self) -> int:
        """Bytes that leaked in the second step."""
        return self.live_bytes[-1] if self.live_bytes else 0


@dataclass(frozen=True)
class CheckResult:
    """The schedule's step against the plain one, on equal weights and an equal batch.

    `max_gradient_error`: the largest of max|g - g_plain| / max|g_plain| over all parameters whose gradient is more than
    rounding; it is that of `worst_parameter` (stage and name). `loss_error`: |loss - loss_plain| / |loss_plain|.
    `failures`: a sentence for each thing that is wrong beyond rounding, with the parameter or the device; empty where
    the check passed.
    """

    max_gradient_error: float
    worst_parameter: str
    loss_error: float
    devices: tuple[DeviceMemory, ...]
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingResult(Displayed):
    """Result of a run: loss (mean over the batch, before the step's update) and seconds of each step.

    The first step is `first_step`, above 0 if a checkpoint was resumed. Losses are empty if the check failed
    (`check.failures`): nothing was trained. `trace`: the recorded step, if one was asked for. `stopped`: the signal
    that ended the run, and how to resume. `events`: profiling and solving, as this process saw them. `schedule`: the
    one in use at the end. `bubbles`: share of its steps that each device has waited, empty if not measured.
    `evaluation_loss`: mean over the batches evaluated at the end, if any. `loss_terms`: the terms of a loss that has
    several in each step, by name. `tokens_per_second` and `utilization`: medians of those of its steps.
    """

    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    parameters: int
    processes: int
    check: CheckResult | None
    trace: Trace | None = None
    first_step: int = 0
    stopped: str | None = None
    events: tuple[OnlineEvent, ...] = ()
    schedule: Schedule | None = None
    bubbles: tuple[float, ...] = ()
    evaluation_loss: float | None = None
    loss_terms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    tokens_per_second: float = 0.0
    utilization: float | None = None

    def summary(self) -> Summary:
        """Steps, losses and seconds; of a check, what each device's memory was."""
        facts = [("", f"{len(self.losses)} steps of {self.parameters:,} parameters in {self.processes} process(es)")]
        if self.losses:
            facts.append(("loss", f"{self.losses[0]:.4f} -> {self.losses[-1]:.4f}"))
            facts += [(f"loss, {name}", f"{term[0]:.4f} -> {term[-1]:.4f}") for name, term in self.loss_terms.items()]
            facts.append(("median step", time_text(1e6 * median(self.step_seconds))))
        if self.check is None:
            return Summary("A training run", facts)
        facts.append(("largest gradient error", f"{self.check.max_gradient_error:.2e}"))
        head = ("device", "peak", "planned", "on the host", "left after a step")
        rows = []
        for d, memory in enumerate(self.check.devices):
            sizes = (memory.peak_bytes, memory.planned_peak_bytes, memory.host_peak_bytes, memory.left_bytes)
            rows.append((f"device {d}", *map(bytes_text, sizes)))
        return Summary("A training run, checked", facts, head, rows)
