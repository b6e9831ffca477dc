"""Runs under torchrun: one step of each exported schedule of a folder in torch's own runtime, beside the plain step.

Usage: torch_runtime_worker.py FOLDER. Each NAME.csv has a NAME.json with its numbers of stages and microbatches.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from optpipe.train.check import gradient_error, reference_step
from optpipe.train.config import GPTShape
from optpipe.train.tasks.gpt import VOCABULARY, build_stages, byte_loss
from tests.gloo import gloo_group

SEQUENCES = 2
"""In one microbatch."""


def main(folder: Path) -> None:
    with gloo_group():
        paths = sorted(folder.glob("*.csv"))  # in the same order on all ranks
        results = {path.stem: run(path, **json.loads(path.with_suffix(".json").read_text())) for path in paths}
        (folder / f"rank{dist.get_rank()}.results").write_text(json.dumps(results))


def run(path: Path, stages: int, microbatches: int) -> dict[str, Any]:
    """This rank's stages, their largest gradient error, and where the last stage is here, both losses."""
    shape = GPTShape(width=8, heads=2, sequence=4, layers=stages)
    mine = stages_of_rank(path, dist.get_rank())
    batch = torch.Generator().manual_seed(1)
    size = (microbatches * SEQUENCES, shape.sequence)
    inputs, targets = (torch.randint(VOCABULARY, size, generator=batch) for _ in range(2))

    modules = build_stages(shape, stages, 0, torch.float64)
    runtime = _PipelineScheduleRuntime(
        [PipelineStage(modules[s], s, stages, torch.device("cpu")) for s in mine], microbatches, loss_fn=byte_loss
    )
    runtime._load_csv(str(path), format="compute_only")
    losses: list[torch.Tensor] = []
    last = {"target": targets, "losses": losses} if stages - 1 in mine else {}
    runtime.step(*([inputs] if 0 in mine else []), **last)

    plain = build_stages(shape, stages, 0, torch.float64)
    plain_loss = reference_step(plain, byte_loss, inputs.chunk(microbatches), targets.chunk(microbatches))
    pairs = [pair for s in mine for pair in zip(modules[s].parameters(), plain[s].parameters(), strict=True)]
    error = max(gradient_error(ours.grad, theirs.grad) for ours, theirs in pairs)
    found = {"loss": torch.stack(losses).mean().item(), "plain_loss": plain_loss} if last else {}
    return {"stages": mine, "max_gradient_error": error, **found}


def stages_of_rank(path: Path, rank: int) -> list[int]:
    """The stages in a rank's row: those that it must make."""
    with path.open(newline="") as file:
        row = list(csv.reader(file))[rank]
    return sorted({int(cell[: cell.index("F")]) for cell in row if "F" in cell})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
