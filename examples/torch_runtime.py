"""Train the stages of own_stages.py by a schedule of OptPipe in PyTorch's own pipeline runtime, without OptPipe.

optpipe export schedule.json --to torch-csv -o schedule.csv
torchrun --nproc-per-node 4 examples/torch_runtime.py schedule.csv
"""

import csv
import sys

import torch
import torch.distributed as dist
from own_stages import MICROBATCHES, batch, build  # type: ignore[import-not-found]  # beside this file
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

STEPS = 20


def main(path: str) -> None:
    """Run on every rank of torchrun; the last stage's prints the loss."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    modules, _, _, loss = build()
    mine = stages_of(path, dist.get_rank())
    stages = [PipelineStage(modules[s], s, len(modules), torch.device("cpu")) for s in mine]
    runtime = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss)  # type: ignore[no-untyped-call]
    runtime._load_csv(path, format="compute_only")  # what sends and receives follow from the order, torch adds
    optimizer = torch.optim.AdamW([p for s in mine for p in modules[s].parameters()], lr=1e-3)
    for step in range(STEPS):
        inputs, targets = (torch.cat(parts) for parts in batch(step))
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if len(modules) - 1 in mine:
            runtime.step(*([inputs] if 0 in mine else []), target=targets, losses=losses)
            print(f"step {step + 1} of {STEPS}  loss {torch.stack(losses).mean():.4f}", flush=True)
        else:
            runtime.step(*([inputs] if 0 in mine else []))
        optimizer.step()
    dist.destroy_process_group()


def stages_of(path: str, rank: int) -> list[int]:
    """Return the stages of a rank: those with a forward in its row."""
    with open(path, newline="") as file:
        row = list(csv.reader(file))[rank]
    return sorted({int(cell.partition("F")[0]) for cell in row if "F" in cell})


if __name__ == "__main__":
    main(sys.argv[1])
