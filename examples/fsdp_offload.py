"""Train under pp 2 x fsdp 2 by a schedule that offloads, and by torch's ZB-V beside it.

optpipe solve examples/problems/v-p2-m8.json -o schedule.json
torchrun --nproc-per-node 4 examples/fsdp_offload.py schedule.json
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble

from optpipe.pipelining import PlannedSchedule
from optpipe.runtime import MemoryMeter
from optpipe.train.tasks.gpt import VOCABULARY, GPTShape, build_stages, byte_loss

STAGES, MICROBATCHES, STEPS, SEQUENCES, LENGTH = 4, 8, 5, 8, 32


def train(mesh: DeviceMesh, make: Callable[[list[Any]], Any]) -> tuple[list[float], int, float]:
    """Return the losses of each step (on the last stage's rank), the peak in bytes, and the fastest step in seconds."""
    modules = build_stages(GPTShape(64, 4, LENGTH, layers=STAGES), STAGES, seed=0, dtype=torch.float32)
    rank = mesh.get_local_rank("pp")
    mine = [rank, STAGES - 1 - rank]
    for s in mine:
        fully_shard(modules[s], mesh=mesh["dp"], reshard_after_forward=False)
    stages = [PipelineStage(modules[s], s, STAGES, torch.device("cpu"), group=mesh.get_group("pp")) for s in mine]
    schedule = make(stages)
    optimizer = torch.optim.AdamW([p for s in mine for p in modules[s].parameters()], lr=1e-3)
    means: list[float] = []
    seconds: list[float] = []
    meter = MemoryMeter()
    for step in range(STEPS):
        own_batch = torch.Generator().manual_seed(2 * step + mesh.get_local_rank("dp"))
        x, y = torch.randint(VOCABULARY, (2, SEQUENCES * MICROBATCHES, LENGTH), generator=own_batch)
        losses: list[torch.Tensor] = []
        last = {"target": y, "losses": losses} if STAGES - 1 in mine else {}
        begin = time.perf_counter()
        with ExitStack() as measured:
            if step == 1:  # the first step allocates what then stays; the meter slows its own step down
                measured.enter_context(meter)
                measured.enter_context(meter.on(0))
            schedule.step(*[x] * (0 in mine), **last, return_outputs=False)
        seconds.append(time.perf_counter() - begin)
        means += [torch.stack([loss.detach() for loss in losses]).mean().item()] if losses else []
        optimizer.step()
        optimizer.zero_grad()
    return means, meter.peak_bytes[0], min(seconds)


def main(path: str) -> None:
    """Run on every rank of torchrun; rank 0, which has the last stage, prints."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    ours = train(mesh, lambda stages: PlannedSchedule(stages, path, loss_fn=byte_loss))
    theirs = train(mesh, lambda stages: ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=byte_loss))
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, (ours[1], theirs[1]))
    if dist.get_rank() == 0:
        for step, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
            print(f"step {step}  loss {a:.6f} as planned, {b:.6f} by torch")
        for rank, (a, b) in enumerate(peaks):
            print(f"rank {rank}  peak {a / 2**20:.1f} MiB as planned, {b / 2**20:.1f} MiB by torch")
        print(f"a step takes {ours[2] / theirs[2]:.2f} times as long as torch's on the host", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
