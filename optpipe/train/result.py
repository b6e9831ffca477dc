"""What training answers with."""

from __future__ import annotations

from dataclasses import dataclass

from optpipe.trace import Trace


@dataclass(frozen=True)
class StepReport:
    """One step done, counted from 0 of `steps`. `loss` is the mean over the batch, in nats a byte."""

    step: int
    steps: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device in a checked step.

    `peak_bytes`: the most that was alive at once (activations, workspace, received messages; not weights, gradients,
    optimizer state). `planned_peak_bytes`: the same by the program's order with the sizes of single ops measured
    alone. `live_bytes`: what was still alive after each of two steps, 0 unless something leaks. `host_peak_bytes`:
    the most that its offloads held on the host.
    """

    peak_bytes: int
    planned_peak_bytes: int
    live_bytes: tuple[int, ...]
    host_peak_bytes: int


@dataclass(frozen=True)
class CheckResult:
    """The schedule's step against the plain one, on equal weights and an equal batch.

    `max_gradient_error`: the largest over all parameters of max|g - g_plain| / max|g_plain|; it is that of
    `worst_parameter` (stage and name). `loss_error`: |loss - loss_plain| / |loss_plain|.
    """

    max_gradient_error: float
    worst_parameter: str
    loss_error: float
    devices: tuple[DeviceMemory, ...]


@dataclass(frozen=True)
class TrainingResult:
    """A finished run: loss (nats a byte, mean over the batch, before the step's update) and seconds of each step.

    `trace` is there where a step was to be recorded.
    """

    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    parameters: int
    processes: int
    check: CheckResult | None
    trace: Trace | None = None
