"""Trains until an online planner is done: usage online_worker.py FOLDER SECONDS, 0: without a search."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from optpipe.pipelining import OnlinePlanner, PlannedSchedule, recording_schedule
from tests.gloo import gloo_group

ROWS, WIDTH, MICROBATCHES = 4, 8, 7
MODES = ["full", "full+offload"]
LONGEST_S = 240.0


def main(folder: Path, time_limit_s: float | None) -> None:
    with gloo_group() as rank:
        torch.manual_seed(1)
        parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
        stage = PipelineStage(parts[rank], rank, 2, torch.device("cpu"))
        first = recording_schedule([0, 1], MICROBATCHES, modes=MODES)
        schedule = PlannedSchedule(stage, first, loss_fn=nn.functional.mse_loss)
        planner = OnlinePlanner(schedule, memory_bytes=2**20, time_limit_s=time_limit_s, every=1, steps=1, skip=1)
        x = torch.randn(ROWS * MICROBATCHES, WIDTH)
        methods, gradients, begin, over = [schedule.schedule.method], [], time.monotonic(), torch.zeros(1)
        while not over:
            parts[rank].zero_grad()
            schedule.step(*[x] * (rank == 0), **({"target": x} if rank else {}), return_outputs=False)
            gradients.append(parts[rank][0].weight.grad.clone())
            if planner.step_done():
                methods.append(schedule.schedule.method)
            over = torch.tensor([float(rank == 0 and (planner.done or time.monotonic() - begin > LONGEST_S))])
            dist.broadcast(over, 0)
            time.sleep(0.02)  # leaves the processors to the search
        error = max(float((g - gradients[0]).abs().max()) for g in gradients)
        modes = [mode.name for mode in schedule.schedule.problem.stages[1].modes]
        found = {"methods": methods, "error": error, "log": planner.log, "modes": modes}
        (folder / f"online{rank}.json").write_text(json.dumps(found))
        planner.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) or None)
