"""`TrainingConfig`: everything that a run depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from optpipe.errors import InputError, Issue
from optpipe.train.config.checkpoints import CheckpointConfig
from optpipe.train.config.model import ModelConfig
from optpipe.train.config.online import OnlineConfig
from optpipe.train.config.optimizer import OptimizerConfig
from optpipe.train.config.output import OutputConfig
from optpipe.train.config.setting import Group, setting

if TYPE_CHECKING:
    from optpipe.schedule import Schedule

DeviceChoice = Literal["auto", "cpu", "cuda"]
MAX_SEED = 2**63 - 1

WARM_UP_STEPS = 3
"""Trained before a step is recorded, where there are so many: the first take longer, threads start, memory is got."""


@dataclass(frozen=True)
class TrainingConfig(Group):
    """One training run. Raises InputError naming the field, the value and the limit."""

    schedule: Schedule | None = None
    """who computes what in which order, its sizes and times need not be this model's; None: it is solved for first"""
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    online: OnlineConfig = field(default_factory=OnlineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    steps: int = setting(20, "optimizer steps, those before a resumed checkpoint included", least=1, most=10**9)
    seed: int = setting(0, "of weights, of the order of data and of what layers draw", least=0, most=MAX_SEED)
    device: DeviceChoice = setting("auto", "what to compute on; auto: on CUDA where there is any")
    data_parallel: int = setting(
        1, "replicas of the pipeline, each with its part of the batch; more than one needs torchrun", least=1, most=4096
    )
    check: bool = setting(False, "before training, compare gradients with the plain step and memory with the plan")
    evaluate: int = setting(
        0, "batches evaluated at the end, forward alone: those of the steps that would follow", least=0, most=10**6
    )
    timeout_seconds: float = setting(300.0, "under torchrun: how long to wait for another process", above=0, most=1e6)

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients come together from several processes or stages."""
        return self.data_parallel > 1 or self.model.tied

    def recorded_step(self, first_step: int) -> int | None:
        """Before which step of a run that begins with `first_step` to record one, if at all."""
        if self.output.trace_step is None and self.output.trace is not None:
            return min(first_step + WARM_UP_STEPS, self.steps - 1)
        return self.output.trace_step

    def conflicts(self) -> Iterator[Issue]:
        """A schedule is given or sought; each of its stages gets a layer; the step to record is one of the run."""
        missing = [] if self.schedule else list(self._nothing_to_run())
        if missing:
            yield from missing
            return
        layers, trace_step = self.model.layers, self.output.trace_step
        stages = len(self.schedule.problem.stages if self.schedule else self.online.placed())
        if layers is not None and layers < stages:
            detail = (
                f"is {layers} but the schedule has {stages} stages, and each needs a layer. "
                f"Maybe leave layers out, or solve for at most {layers} stages."
            )
            yield Issue("model.layers", "too_few", detail)
        if trace_step is not None and trace_step >= self.steps:
            detail = f"is {trace_step} but must be from 0 to {self.steps - 1}: the run has {self.steps} steps."
            yield Issue("output.trace_step", "out_of_range", detail)

    def _nothing_to_run(self) -> Iterator[Issue]:
        """Without a schedule one is sought, for devices that are then named."""
        if not self.online.on:
            detail = 'is missing. Maybe schedule = "schedule.json", or --solve to have one found.'
            yield Issue("schedule", "missing", detail)
        elif self.online.devices is None:
            yield Issue("online.devices", "missing", "is missing, and no schedule says how many. Maybe 4.")
        else:
            try:
                self.online.placed("online.")
            except InputError as error:
                yield from error.issues
