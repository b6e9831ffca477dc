"""Runs under torchrun: schedules over groups for each directed pair of ranks, as NCCL has them, but over gloo.

Usage: pair_groups_worker.py FOLDER. Writes each rank's largest gradient error by schedule, and its pairs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from optpipe.compile import compile_schedule
from optpipe.runtime import Pipeline
from optpipe.runtime.distributed import Nccl, directed_pairs
from optpipe.schedule import Schedule
from optpipe.train.check import gradient_error
from tests.gloo import gloo_group
from tests.optpipe.runtime.chains import batch, chain, plain_gradients, specs, stages_of

DTYPE = torch.float64
TWO_REPLICAS = [[0, 2], [3, 1]]
"""The rank of each device, of schedules on two devices."""


def main(folder: Path) -> None:
    with gloo_group():
        found = {path.name: run(Schedule.load(path)) for path in sorted(folder.glob("*.schedule.json"))}
        (folder / f"rank{dist.get_rank()}.results").write_text(json.dumps(found))


def run(schedule: Schedule) -> dict[str, Any]:
    program, rank = compile_schedule(schedule), dist.get_rank()
    count = len(program.placement)
    modules, (inputs, targets) = chain(count, DTYPE), batch(count, DTYPE)
    plain = dict(zip(named_parameters(modules), plain_gradients(modules, inputs, targets), strict=True))
    replicas = [range(4)] if len(program.devices) == 4 else TWO_REPLICAS
    [device] = [ranks.index(rank) for ranks in replicas if rank in ranks]
    mine = {s: stage for s, stage in stages_of(modules).items() if program.placement[s] == device}
    transport = Nccl(program, torch.device("cpu"), "gloo", replicas)
    pipeline = Pipeline(program, mine, [device], transport, specs(count, DTYPE))
    for _ in range(2):
        pipeline.run(inputs, targets)
    errors = [
        gradient_error(parameter.grad, plain[name])
        for name, parameter in named_parameters(modules).items()
        if parameter.grad is not None
    ]
    return {"error": max(errors), "parameters": len(errors), "pairs": directed_pairs(program)}


def named_parameters(modules: list[nn.Module]) -> dict[str, nn.Parameter]:
    return dict(nn.ModuleList(modules).named_parameters())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
