"""Two steps of torch's own schedules under torch.profiler: usage profiled_worker.py FOLDER. Two ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.profiler import ProfilerActivity, profile

from tests.gloo import gloo_group

WIDTH, ROWS, MICROBATCHES = 64, 16, 4


def main(folder: Path) -> None:
    with gloo_group():
        rank, x = dist.get_rank(), torch.randn(ROWS * MICROBATCHES, WIDTH)
        for name, make, count in (("gpipe", ScheduleGPipe, 2), ("interleaved", ScheduleInterleaved1F1B, 4)):
            own = range(rank, count, 2)
            stages = [PipelineStage(nn.Linear(WIDTH, WIDTH), s, count, torch.device("cpu")) for s in own]
            given = stages if count > 2 else stages[0]
            schedule = make(given, MICROBATCHES, loss_fn=nn.functional.mse_loss)
            schedule.step(*[x] * (rank == 0), **({"target": x} if rank else {}))
            with profile(activities=[ProfilerActivity.CPU]) as taken:
                for _ in range(2):
                    schedule.step(*[x] * (rank == 0), **({"target": x} if rank else {}))
            taken.export_chrome_trace(str(folder / f"{name}{rank}.json"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
