"""Steps of stages that FSDP2, tensor parallelism or DistributedDataParallel have wrapped, against one process.

Usage: wrapped_worker.py FOLDER. FOLDER/cases.json lists the cases: the name of a schedule file and how to wrap.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
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
from tests.gloo import gloo_group

WIDTH, LENGTH, ENTRIES, ROWS = 8, 4, 12, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class ContextBlock(nn.Module):
    """Attention to the whole sequence, of which this rank of `group` has a part: context parallelism."""

    group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.up(x)
        if self.group is not None:
            keys = all_gather_tensor_autograd(keys, gather_dim=1, group=self.group)
        keys, values = keys.chunk(2, dim=-1)
        return x + self.down(torch.softmax(x @ keys.transpose(1, 2), dim=-1) @ values)


class ExpertBlock(nn.Module):
    """Two experts, each for half of the rows; with a `group` each of its ranks has one: expert parallelism."""

    group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleDict({str(e): nn.Linear(WIDTH, WIDTH) for e in range(2)})
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        halves = [len(rows) // 2] * 2
        if self.group is None:
            found = torch.cat([expert(part) for expert, part in zip(self.experts.values(), rows.chunk(2), strict=True)])
        else:
            [expert] = self.experts.values()
            found = expert(all_to_all_single_autograd(rows, halves, halves, self.group))
            found = all_to_all_single_autograd(found, halves, halves, self.group)
        return x + self.down(torch.tanh(found)).view_as(x)


class Part(nn.Module):
    """A stage of two blocks, with tokens in and logits out at the ends of the model."""

    def __init__(self, first: bool, last: bool, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ENTRIES, WIDTH) if first else None
        self.blocks = nn.ModuleList(block() for _ in range(2))
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


def parts_of(count: int, how: dict[str, Any]) -> list[Part]:
    torch.manual_seed(3)
    block = ContextBlock if how.get("context") else ExpertBlock if how.get("experts") else Block
    parts = [Part(s == 0, s == count - 1, block) for s in range(count)]
    if how.get("tied"):
        parts[-1].head.weight = parts[0].embedding.weight
    for part in parts[: how.get("frozen", 0)]:
        part.requires_grad_(False)
    return parts


def sum_tied(copies: list[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients of a parameter's copies on this rank, and on all ranks of the group, as docs/pipelining.md."""
    gradients = [copy.grad.to_local() if isinstance(copy.grad, DTensor) else copy.grad for copy in copies]
    total = torch.stack(gradients).sum(0)
    if group is not None:
        dist.all_reduce(total, group=group)
    for gradient in gradients:
        gradient.copy_(total)


def in_one_process(count: int, microbatches: int, replicas: int, how: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients of two steps on the batches of all replicas, without anything that is tested here."""
    parts = parts_of(count, how)
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
    """A stage, wrapped: `fsdp` is "whole" or "nested", `reshard` that after a forward; `tensor` cuts the blocks.

    `compiled` ones have their blocks compiled one by one before that, as torchtitan does it.
    """
    if how.get("compiled"):
        for block in part.blocks:
            block.compile(backend="aot_eager")
    if how.get("ddp") and any(p.requires_grad for p in part.parameters()):  # DDP refuses others
        return DistributedDataParallel(part, process_group=mesh.get_group("data"))
    ignored: set[nn.Parameter] = set()
    if how.get("context"):
        for block in part.blocks:
            block.group = mesh.get_group("data")
    if how.get("experts"):
        for block in part.blocks:
            block.group = mesh.get_group("data")
            del block.experts[str(1 - mesh.get_local_rank("data"))]
            ignored |= set(block.experts.parameters())
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
            if how.get("boundary"):  # everything within and between stages is a DTensor, cut along the sequence
                for name in ("embedding", "blocks.*.down"):
                    plan[name].use_local_output = False
            plan = {name: style for name, style in plan.items() if "." in name or getattr(part, name) is not None}
        trained = any(parameter.requires_grad for parameter in part.parameters())
        parallelize_module(part, mesh["tensor"], plan).requires_grad_(trained)  # SequenceParallel makes new ones
    if fsdp := how.get("fsdp"):
        options: dict[str, Any] = {"mesh": mesh["data"], "reshard_after_forward": how["reshard"]}
        if how.get("replicate"):
            options["mesh"] = mesh["replicate", "data"]
        if ignored:
            options["ignored_params"] = ignored
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
    replicas, pieces = (2 if {"fsdp", "ddp"} & how.keys() else 1), (2 if {"tensor", "replicate"} & how.keys() else 1)
    names = ("pipeline", "replicate", "data") if how.get("replicate") else ("pipeline", "data", "tensor")
    sizes = (2, pieces, replicas) if how.get("replicate") else (2, replicas, pieces)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    group, place = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
    parts = parts_of(count, how)
    mine = [s for s, stage in enumerate(schedule.problem.stages) if stage.device == place]
    modules = {s: wrapped(parts[s], how, mesh) for s in mine}
    stages = [PipelineStage(module, s, count, torch.device("cpu"), group=group) for s, module in modules.items()]
    planned = PlannedSchedule(stages, schedule, loss_fn=loss_of, scale_grads=False)
    done: Counter[int] = Counter()
    for step in range(2):
        replica = mesh.get_local_rank("data")
        if how.get("replicate"):
            replica, replicas = 2 * replica + mesh.get_local_rank("replicate"), 4
        if how.get("context"):  # each has a part of the sequences
            x, y = (whole.chunk(2, dim=1)[replica].contiguous() for whole in batch_of(step, 0, m))
        else:
            x, y = batch_of(step, replica, m)
        args = (x,) if 0 in mine else ()
        done.clear()
        for s, stage in planned._runtime_stages.items():  # none before the first step, which watches for itself
            stage._weight_gradients.observer = lambda _, s=s: done.update([s])
        with CountCollectives() as counted:
            planned.step(*args, target=y if count - 1 in mine else None)
        held = [len(stage._weight_gradients._kept) for stage in planned._runtime_stages.values()]
        assert not any(held), "W has computed what B left"
    if how.get("tied"):
        group, _ = dist.new_subgroups_by_enumeration(mesh.mesh[[0, -1]].flatten(1).T.tolist())
        copies = [part.weight for s in mine for part in (modules[s].embedding, modules[s].head) if part is not None]
        if copies:
            sum_tied(copies, None if len(copies) == 2 else group)
    weights = Counter(a.stage for actions in planned.program.devices for a in actions if a.kind == "W")
    assert all(done[s] >= 4 * weights[s] for s in mine), "each W computes what the four layers of two blocks left"
    expected = in_one_process(count, m, 1 if how.get("context") else replicas, how)
    error, compared = 0.0, 0
    for s, module in modules.items():
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        for key, parameter in inner.named_parameters():
            gradient = parameter.grad
            if not parameter.requires_grad:
                assert gradient is None, f"{s}.{key}"
                continue
            assert gradient is not None, f"{s}.{key}"
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found, wanted = whole / m, expected[f"{s}.{key}"]  # scale_grads is False, and FSDP and DDP average
            found = found / replicas if "experts" in key else found  # an expert's is a sum, being on one rank alone
            error = max(error, float((found - wanted).abs().max() / wanted.abs().max()))
            compared += 1
    ahead = {a[1:3] for a in planned.program.actions() if a.kind == "C"}
    recomputed: dict[int, Counter[str]] = {s: Counter() for s in mine}
    for s, i in planned.program.recomputed:
        if s in mine:
            name = planned.program.modes[s, i].removesuffix("+offload")
            recomputed[s][f"{name} ahead" if (s, i) in ahead else f"{name} inside"] += 1
    return {"error": error, "compared": compared, "collectives": counted.collectives, "recomputed": recomputed}


def main(folder: Path) -> None:
    # What nn.Linear makes of three dimensions on the CPU is a view, of which torch warns.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    warnings.filterwarnings("ignore", ".*_functional_collectives.*_autograd", FutureWarning)  # renamed in torch 2.13
    # Torch 2.10 says so of its own collectives with a backward; gradients are compared all the same.
    warnings.filterwarnings("ignore", "_c10d_functional::wait_tensor: an autograd kernel was not", UserWarning)
    with gloo_group():
        cases = json.loads((folder / "cases.json").read_text())
        results = [run(folder, **case) for case in cases]
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
