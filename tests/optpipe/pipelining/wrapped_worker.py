"""Steps of stages that FSDP2, tensor parallelism or DistributedDataParallel have wrapped, against one process.

Usage: wrapped_worker.py FOLDER. FOLDER/cases.json lists the cases: the name of a schedule file and how to wrap.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from optpipe.pipelining import PlannedSchedule
from optpipe.schedule import Schedule

WIDTH, LENGTH, ENTRIES, ROWS = 8, 4, 12, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Part(nn.Module):
    """A stage of two blocks, with tokens in and logits out at the ends of the model."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ENTRIES, WIDTH) if first else None
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH) if last else None
        self.head = nn.Linear(WIDTH, ENTRIES) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


class CountCollectives(TorchDispatchMode):
    """Counts collective operations by name, sends and receives left out."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname not in ("send", "recv_"):
            self.collectives[func._opname] += 1
        return func(*args, **(kwargs or {}))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch_of(step: int, replica: int, microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x, y = torch.randint(ENTRIES, (2, microbatches * ROWS, LENGTH), generator=generator)
    return x, y


def parts_of(count: int) -> list[Part]:
    torch.manual_seed(3)
    return [Part(s == 0, s == count - 1) for s in range(count)]


def in_one_process(count: int, microbatches: int, replicas: int) -> dict[str, Tensor]:
    """The gradients of two steps on the batches of all replicas, without anything that is tested here."""
    parts = parts_of(count)
    for step in range(2):
        for replica in range(replicas):
            x, y = batch_of(step, replica, microbatches)
            for rows, target in zip(x.split(ROWS), y.split(ROWS), strict=True):
                message = rows
                for part in parts:
                    message = part(message)
                (loss_of(message, target) / microbatches / replicas).backward()
    return {f"{s}.{name}": p.grad for s, part in enumerate(parts) for name, p in part.named_parameters()}


def wrapped(part: Part, how: dict[str, Any], mesh: DeviceMesh) -> nn.Module:
    """A stage, wrapped: `fsdp` is "whole" or "nested", `reshard` that after a forward; `tensor` cuts the blocks."""
    if how.get("ddp"):
        return DistributedDataParallel(part, process_group=mesh.get_group("data"))
    if tensor := how.get("tensor"):
        plan: dict[str, Any] = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        if tensor == "sequence":
            plan = {
                "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "blocks.*.norm": SequenceParallel(),
                "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
                "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            }
            plan = {name: style for name, style in plan.items() if "." in name or getattr(part, name) is not None}
        parallelize_module(part, mesh["tensor"], plan)
    if fsdp := how.get("fsdp"):
        options = {"mesh": mesh["data"], "reshard_after_forward": how["reshard"]}
        if fsdp == "nested":
            for block in part.blocks:
                fully_shard(block.up, **options)  # a layer by itself, and the rest of its block
                fully_shard(block, **options)
        fully_shard(part, **options)
    return part


def run(folder: Path, name: str, how: dict[str, Any]) -> dict[str, Any]:
    """The largest error of this rank's gradients after two steps, and the collectives of the second."""
    schedule = Schedule.load(folder / f"{name}.json")
    count, m = len(schedule.problem.stages), schedule.problem.microbatches
    replicas, pieces = (2 if {"fsdp", "ddp"} & how.keys() else 1), (2 if "tensor" in how else 1)
    mesh = init_device_mesh("cpu", (2, replicas, pieces), mesh_dim_names=("pipeline", "data", "tensor"))
    group, place = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
    parts = parts_of(count)
    mine = [s for s, stage in enumerate(schedule.problem.stages) if stage.device == place]
    modules = {s: wrapped(parts[s], how, mesh) for s in mine}
    stages = [PipelineStage(module, s, count, torch.device("cpu"), group=group) for s, module in modules.items()]
    planned = PlannedSchedule(stages, schedule, loss_fn=loss_of, scale_grads=False)
    done: Counter[int] = Counter()
    for step in range(2):
        x, y = batch_of(step, mesh.get_local_rank("data"), m)
        args = (x,) if 0 in mine else ()
        done.clear()
        for s, stage in planned._runtime_stages.items():  # none before the first step, which watches for itself
            stage._weight_gradients.observer = lambda _, s=s: done.update([s])
        with CountCollectives() as counted:
            planned.step(*args, target=y if count - 1 in mine else None)
        held = [len(stage._weight_gradients._kept) for stage in planned._runtime_stages.values()]
        assert not any(held), "W has computed what B left"
    weights = Counter(a.stage for actions in planned.program.devices for a in actions if a.kind == "W")
    assert all(done[s] >= 4 * weights[s] for s in mine), "each W computes what the four layers of two blocks left"
    expected = in_one_process(count, m, replicas)
    error, compared = 0.0, 0
    for s, module in modules.items():
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        for key, parameter in inner.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, f"{s}.{key}"
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found, wanted = whole / m, expected[f"{s}.{key}"]  # scale_grads is False, and FSDP and DDP average
            error = max(error, float((found - wanted).abs().max() / wanted.abs().max()))
            compared += 1
    return {"error": error, "compared": compared, "collectives": counted.collectives, "stages": mine}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # What nn.Linear makes of three dimensions on the CPU is a view, of which torch warns.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    dist.init_process_group("gloo")
    cases = json.loads((folder / "cases.json").read_text())
    results = [run(folder, **case) for case in cases]
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
