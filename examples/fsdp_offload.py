"""Train under pp 2 x fsdp 2 by a schedule that offloads, and by torch's ZB-V: torchrun --nproc-per-node 4, see docs."""

import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble

from optpipe.pipelining import PlannedSchedule
from optpipe.runtime import MemoryMeter
from optpipe.train.tasks.gpt import VOCABULARY, GPTShape, build_stages, byte_loss

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
rank, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
mine, fastest, peaks = (rank, 3 - rank), list[float](), [""] * 4
for make, plan in list[Any]([(PlannedSchedule, sys.argv[1]), (ScheduleZBVZeroBubble, 8)]):
    parts = build_stages(GPTShape(64, 4, 32, layers=4), 4, seed=0, dtype=torch.float32)
    for s in mine:
        fully_shard(parts[s], mesh=mesh["dp"], reshard_after_forward=False)
    stages: list[Any] = [PipelineStage(parts[s], s, 4, torch.device("cpu"), group=mesh.get_group("pp")) for s in mine]
    schedule = make(stages, plan, loss_fn=byte_loss)
    optimizer = torch.optim.AdamW([p for s in mine for p in parts[s].parameters()], lr=1e-3)
    meter, seconds, losses = MemoryMeter(), [], list[torch.Tensor]()
    for step in range(5):
        x, y = torch.randint(VOCABULARY, (2, 64, 32), generator=torch.Generator().manual_seed(2 * step + replica))
        last, begin = {"target": y, "losses": losses} if 3 in mine else {}, time.perf_counter()
        with meter if step == 1 else nullcontext(), meter.on(0):  # step 0 allocates what then stays
            schedule.step(*[x] * (0 in mine), **last, return_outputs=False)
        seconds.append(time.perf_counter() - begin)
        optimizer.step()
        optimizer.zero_grad()
    fastest.append(min(seconds))
    dist.all_gather_object(peaks, f"{meter.peak_bytes[0] / 2**20:.1f}")
    if dist.get_rank() == 0:
        print(f"{type(schedule).__name__}: loss {torch.stack(losses).mean():.6f}, peaks {peaks} MiB", flush=True)
if dist.get_rank() == 0:
    print(f"a step takes {fastest[0] / fastest[1]:.2f} times as long as torch's on the host", flush=True)
dist.destroy_process_group()
