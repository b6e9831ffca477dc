"""The GPT as a pipeline: this process's stages with their optimizer, and the program that runs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from optpipe.compile import Program
from optpipe.problem import Problem
from optpipe.runtime import Gloo, MessageSpec, Nccl, Pipeline, Stage, Transport, local_transport
from optpipe.runtime.gradient_sync import GradientSync, TiedWeights, tie_groups
from optpipe.train.config import TrainingConfig
from optpipe.train.gpt import build_stages, byte_loss, tied_weights
from optpipe.train.launch import Launch

Batch = tuple[list[Tensor], list[Tensor]]
"""Inputs and targets by microbatch."""


class Model:
    """A GPT cut into the schedule's stages. Every process draws the whole model from the seed and keeps its stages."""

    def __init__(self, config: TrainingConfig, program: Program, launch: Launch) -> None:
        self.config, self.program, self.launch = config, program, launch
        self.problem: Problem = config.schedule.problem
        self.devices, self.hardware = launch.own_devices, launch.hardware
        modules = build_stages(config.shape, len(program.placement), config.seed, config.torch_dtype, tied=config.tied)
        self.parameters = sum(p.numel() for module in modules for p in module.parameters())
        last = len(modules) - 1
        self.stages = {
            s: Stage(
                module.to(self.hardware),
                first=s == 0,
                loss=byte_loss if s == last else None,
                gradient_scale=1 / (launch.replicas * program.microbatches),
                autocast=config.torch_autocast,
                seed=config.seed + launch.replica,
            )
            for s, module in enumerate(modules)
            if program.placement[s] in self.devices
        }
        activation = (config.microbatch_size, config.shape.sequence, config.shape.width)
        self.messages = [MessageSpec(activation, config.torch_dtype)] * last
        sync = self._gradient_sync(modules) if config.sums_gradients else None
        self.pipeline = Pipeline(program, self.stages, self.devices, self._transport(), self.messages, sync=sync)
        mine = [p for stage in self.stages.values() for p in stage.module.parameters()]
        self._optimizer = torch.optim.AdamW(mine, lr=config.learning_rate) if mine else None

    def _transport(self) -> Transport:
        if not self.launch.distributed:
            return local_transport(self.hardware)
        if self.hardware.type == "cuda":
            return Nccl(self.program, self.hardware, replicas=self.launch.pipelines)
        return Gloo(self.launch.pipeline)

    def _gradient_sync(self, modules: Sequence[nn.Module]) -> GradientSync:
        launch, placement = self.launch, self.program.placement
        ties = []
        if self.config.tied:
            first, last = tied_weights(modules)
            tie = TiedWeights((0, first), (len(modules) - 1, last))
            ties = tie_groups([tie], lambda stage: launch.ranks_of(placement[stage]))
        return GradientSync(self.stages, launch.same_device, ties)

    def messages_at(self, stage: int) -> tuple[MessageSpec | None, MessageSpec | None]:
        """The messages before and after a stage, None at the ends of the model."""
        before = self.messages[stage - 1] if stage else None
        return before, self.messages[stage] if stage < len(self.messages) else None

    def step(self, inputs: list[Tensor], targets: list[Tensor]) -> float:
        """One step of the schedule and of AdamW; returns the mean loss before the update, in every process.

        The batch is that of all replicas; this one runs its part.
        """
        losses = self.launch.sum(self.pipeline.run(*self.own_part((inputs, targets))))
        if self._optimizer:
            self._optimizer.step()
        return self.mean_loss(losses)

    def own_part(self, batch: Batch) -> Batch:
        """The microbatches of this replica, on this process's hardware."""
        m = self.program.microbatches
        mine = slice(self.launch.replica * m, (self.launch.replica + 1) * m)
        return moved((batch[0][mine], batch[1][mine]), self.hardware)

    def mean_loss(self, losses: Tensor) -> float:
        """Of the sum of all processes' losses, shape (microbatches,)."""
        return float(losses.mean()) / self.launch.replicas


def moved(batch: Batch, hardware: torch.device) -> Batch:
    """The batch on a device; nothing is copied where it is there."""
    inputs, targets = ([part.to(hardware) for part in parts] for parts in batch)
    return inputs, targets
