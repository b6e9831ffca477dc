"""Runs under torchrun: a step of torch's Schedule1F1B and one of the same schedule here, with their peaks of memory.

Usage: torch_schedule_worker.py FOLDER SCHEDULE.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from optpipe.compile import compile_schedule
from optpipe.runtime import Gloo, MemoryMeter, MessageSpec, Pipeline, Stage
from optpipe.schedule import Schedule
from optpipe.train.config import SIZES, GPTShape
from optpipe.train.tasks.gpt import build_stages, byte_loss
from tests.gloo import gloo_group

Batch = tuple[list[Tensor], list[Tensor]]


WIDTH, HEADS, LENGTH = SIZES["tiny"]
SEQUENCES = 4
"""In a microbatch."""


def main(folder: Path, schedule: Schedule) -> None:
    with gloo_group():
        rank, world = dist.get_rank(), dist.get_world_size()
        shape = (schedule.problem.microbatches, 2, SEQUENCES, LENGTH)
        pairs = torch.randint(256, shape, generator=torch.Generator().manual_seed(0))
        batch = ([x.clone() for x in pairs[:, 0]], [y.clone() for y in pairs[:, 1]])
        torch_peak, torch_gradients = by_torch(own_module(rank, world), batch, rank, world)
        peak, gradients = by_us(own_module(rank, world), schedule, batch, rank, world)
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(gradients, torch_gradients, strict=True))
        result = {"torch_peak_bytes": torch_peak, "peak_bytes": peak, "gradient_error": error}
        (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))


def own_module(rank: int, world: int) -> nn.Module:
    """This rank's stage of the tiny GPT, one block a stage."""
    return build_stages(GPTShape(WIDTH, HEADS, LENGTH, world), world, seed=0, dtype=torch.float32)[rank]


def by_torch(module: nn.Module, batch: Batch, rank: int, world: int) -> tuple[int, list[Tensor]]:
    """Peak and gradients of the second step: in the first one torch allocates buffers that it keeps."""
    meter = MemoryMeter()
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, len(batch[0]), loss_fn=byte_loss)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inputs, targets = torch.cat(batch[0]), torch.cat(batch[1])
    with meter, meter.on(0):
        for _ in range(2):
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            torch._foreach_zero_(gradients)
            meter.restart_peak()
            batch_here = (inputs,) if rank == 0 else ()
            schedule.step(*batch_here, target=targets if rank == world - 1 else None, return_outputs=False)
    return meter.peak_bytes[0], gradients


def by_us(module: nn.Module, schedule: Schedule, batch: Batch, rank: int, world: int) -> tuple[int, list[Tensor]]:
    """Peak and gradients of the second step here."""
    meter = MemoryMeter()
    stage = Stage(
        module, first=rank == 0, loss=byte_loss if rank == world - 1 else None, gradient_scale=1 / len(batch[0])
    )
    messages = [MessageSpec((SEQUENCES, LENGTH, WIDTH), torch.float32)] * (world - 1)
    pipeline = Pipeline(compile_schedule(schedule), {rank: stage}, [rank], Gloo(), messages)
    for _ in range(2):
        meter.restart_peak()
        pipeline.run(*batch, meter)
    return meter.peak_bytes[rank], [p.grad for p in module.parameters() if p.grad is not None]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Schedule.load(Path(sys.argv[2])))
