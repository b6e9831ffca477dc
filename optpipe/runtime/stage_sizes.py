"""Measures what the stages of a model really hold, and puts it into a problem in place of the planned sizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import Tensor

from optpipe.problem import Problem
from optpipe.runtime.host_pool import HostPool
from optpipe.runtime.memory_meter import MemoryMeter
from optpipe.runtime.stage import Stage
from optpipe.runtime.transport import MessageSpec


@dataclass(frozen=True)
class StageSizes:
    """Bytes of one microbatch on one stage, as the contract's fields of a stage define them.

    `offload_bytes` may leave to the host. Workspaces are what an op needs beside what is held before it (F: after
    it), the message that it uses and the one that it makes included.
    """

    activation_bytes: int
    backward_weight_bytes: int
    offload_bytes: int
    workspace_bytes: dict[str, int]


def measure_stage(
    stage: Stage, batch: tuple[Tensor, Tensor], before: MessageSpec | None, after: MessageSpec | None
) -> StageSizes:
    """Run one microbatch through a stage twice, once with B and W, O and R, once with BW.

    `batch` is a microbatch's input and target; `before` and `after` are the messages at the stage's boundaries,
    None at the ends. Adds to gradients: set them to zero afterwards.
    """
    stage.zero_gradients()
    meter = MemoryMeter()
    with meter, meter.on(0):
        probe = _Probe(stage, meter, batch, before, after)
        activation, work_f = probe.forward()
        offload = probe.offload_and_reload()
        kept, work_b = probe.backward(fused=False)
        work_w = probe.backward_weight()
        probe.forward()
        _, work_bw = probe.backward(fused=True)
    return StageSizes(activation, kept, offload, {"F": work_f, "B": work_b, "W": work_w, "BW": work_bw})


class _Probe:
    """Runs the ops of microbatch 0; each answers with bytes held after it, or its workspace, or both."""

    def __init__(
        self,
        stage: Stage,
        meter: MemoryMeter,
        batch: tuple[Tensor, Tensor],
        before: MessageSpec | None,
        after: MessageSpec | None,
    ) -> None:
        self.stage, self.meter, self.batch, self.before, self.after = stage, meter, batch, before, after

    @property
    def _live(self) -> int:
        return self.meter.live_bytes[0]

    @property
    def _peak(self) -> int:
        return self.meter.peak_bytes[0]

    def forward(self) -> tuple[int, int]:
        self.meter.restart_peak()
        received = self.before.empty().zero_() if self.before else self.batch[0]
        self.stage.forward(0, received, None if self.after else self.batch[1], offloads=True)
        del received
        return self._live, self._peak - self._live

    def offload_and_reload(self) -> int:
        held = self._live
        with self.meter.on(None):
            self.stage.offload(0, HostPool())
        moved = held - self._live
        self.stage.reload(0)
        return moved

    def backward(self, *, fused: bool) -> tuple[int, int]:
        held = self._live
        self.meter.restart_peak()
        gradient = self.after.empty().zero_() if self.after else None
        (self.stage.backward if fused else self.stage.backward_input)(0, gradient)
        del gradient
        return self._live, self._peak - held

    def backward_weight(self) -> int:
        held = self._live
        self.meter.restart_peak()
        self.stage.backward_weight(0)
        return self._peak - held


def with_measured_sizes(problem: Problem, sizes: list[StageSizes]) -> Problem:
    """The same problem with measured sizes; times, placement and budgets stay. A stage that never offloads stays so."""
    stages = []
    for stage, size in zip(problem.stages, sizes, strict=True):
        measured = asdict(size)
        moved = measured.pop("offload_bytes")
        offload = stage.offload.to_data() | {"bytes": moved} if stage.offload else None
        stages.append(stage.to_data() | measured | {"offload": offload})
    return Problem.from_data(problem.to_data() | {"stages": stages})
