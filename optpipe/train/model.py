"""The GPT as a pipeline: this process's stages with their optimizer, and the program that runs them."""

from __future__ import annotations

import torch
from torch import Tensor

from optpipe.compile import Program
from optpipe.problem import Problem
from optpipe.runtime import Gloo, Mailbox, MessageSpec, Pipeline, Stage
from optpipe.train.config import TrainingConfig
from optpipe.train.gpt import build_stages, byte_loss
from optpipe.train.launch import Launch


class Model:
    """A GPT cut into the schedule's stages. Every process draws the whole model from the seed and keeps its stages."""

    def __init__(self, config: TrainingConfig, program: Program, launch: Launch) -> None:
        self.program, self.launch = program, launch
        self.problem: Problem = config.schedule.problem
        self.devices = launch.devices(len(program.devices))
        modules = build_stages(config.shape, len(program.placement), config.seed, config.torch_dtype)
        self.parameters = sum(p.numel() for module in modules for p in module.parameters())
        last = len(modules) - 1
        self.stages = {
            s: Stage(
                module,
                first=s == 0,
                loss=byte_loss if s == last else None,
                gradient_scale=1 / program.microbatches,
            )
            for s, module in enumerate(modules)
            if program.placement[s] in self.devices
        }
        activation = (config.microbatch_size, config.shape.sequence, config.shape.width)
        self.messages = [MessageSpec(activation, config.torch_dtype)] * last
        transport = Gloo() if launch.distributed else Mailbox()
        self.pipeline = Pipeline(program, self.stages, self.devices, transport, self.messages)
        mine = [p for stage in self.stages.values() for p in stage.module.parameters()]
        self._optimizer = torch.optim.AdamW(mine, lr=config.learning_rate) if mine else None

    def messages_at(self, stage: int) -> tuple[MessageSpec | None, MessageSpec | None]:
        """The messages before and after a stage, None at the ends of the model."""
        before = self.messages[stage - 1] if stage else None
        return before, self.messages[stage] if stage < len(self.messages) else None

    def step(self, inputs: list[Tensor], targets: list[Tensor]) -> float:
        """One step of the schedule and of AdamW; returns the mean loss before the update, in every process."""
        losses = self.launch.sum(self.pipeline.run(inputs, targets))
        if self._optimizer:
            self._optimizer.step()
        return float(losses.mean())
