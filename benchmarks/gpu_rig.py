"""Pipelines of virtual devices on one GPU, or on the CPU for a check of the arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from optpipe.compile import Program, compile_schedule
from optpipe.compile.memory import planned_peaks_bytes
from optpipe.runtime import MessageSpec, Pipeline, Stage
from optpipe.runtime.probe import StageSizes, measure_stage, with_measured_sizes
from optpipe.runtime.transport import local_transport
from optpipe.schedule import Schedule
from optpipe.train.config import GPTShape
from optpipe.train.tasks.gpt import VOCABULARY, build_stages, byte_loss

SEQUENCES = 1
"""Sequences in a microbatch."""


@dataclass(frozen=True)
class Rig:
    """Small GPT with one stage for each of the schedule's, all on `device`."""

    schedule: Schedule
    shape: GPTShape
    device: torch.device
    dtype: torch.dtype = torch.float32

    @cached_property
    def program(self) -> Program:
        """Compiled program of the schedule."""
        return compile_schedule(self.schedule)

    @cached_property
    def modules(self) -> list[nn.Module]:
        """Modules of the stages, on the device."""
        return [module.to(self.device) for module in self.plain_modules()]

    def plain_modules(self) -> list[nn.Module]:
        """Second copy of the model, with equal weights."""
        modules = build_stages(self.shape, len(self.program.placement), 0, self.dtype)
        return [module.to(self.device) for module in modules]

    @cached_property
    def stages(self) -> dict[int, Stage]:
        """Stages of the runtime, by number."""
        last = len(self.modules) - 1
        scale = 1 / self.program.microbatches
        return {
            s: Stage(module, first=s == 0, loss=byte_loss if s == last else None, gradient_scale=scale)
            for s, module in enumerate(self.modules)
        }

    @cached_property
    def messages(self) -> list[MessageSpec]:
        """Message of each boundary."""
        shape = (SEQUENCES, self.shape.sequence, self.shape.width)
        return [MessageSpec(shape, self.dtype)] * (len(self.modules) - 1)

    @cached_property
    def batch(self) -> tuple[list[Tensor], list[Tensor]]:
        """Random bytes, inputs and targets by microbatch."""
        generator = torch.Generator().manual_seed(0)
        size = (2, self.program.microbatches, SEQUENCES, self.shape.sequence)
        inputs, targets = torch.randint(VOCABULARY, size, generator=generator).to(self.device)
        return [x.clone() for x in inputs], [y.clone() for y in targets]

    @cached_property
    def pipeline(self) -> Pipeline:
        """Pipeline with all devices in this process, on one GPU."""
        devices = range(len(self.program.devices))
        transport = local_transport(self.device)
        return Pipeline(self.program, self.stages, devices, transport, self.messages)

    @cached_property
    def sizes(self) -> list[StageSizes]:
        """Measured sizes of each stage."""
        first = (self.batch[0][0], self.batch[1][0])
        edges = [None, *self.messages, None]
        return [measure_stage(stage, first, edges[s], edges[s + 1]) for s, stage in self.stages.items()]

    def planned_peaks_bytes(self) -> list[int]:
        """Planned memory of each device, by the program's order and the measured sizes."""
        measured = with_measured_sizes(self.schedule.problem, self.sizes)
        return planned_peaks_bytes(self.program, measured, [spec.size_bytes for spec in self.messages])
