"""A run that is recorded, planned from its records, and goes on by that plan: usage recorder_worker.py FOLDER CASES.

Two pipeline ranks times two shards. Each rank writes what it measured to FOLDER/found*.json.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

from optpipe.compile.memory import planned_peaks_bytes
from optpipe.pipelining import PlannedSchedule, Recorder, recording_schedule
from optpipe.pipelining.fsdp import gathered_parameters
from optpipe.profile.from_run import join_records
from optpipe.runtime import MemoryMeter
from optpipe.trace.record import load_records
from tests.gloo import gloo_group
from tests.recomputing import random_in_modes

WIDTH, ROWS, MICROBATCHES = 32, 512, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Counting:
    """Observer of a step that only counts memory, gathered parameters included."""

    def __init__(self, planned: PlannedSchedule) -> None:
        self.meter = MemoryMeter()
        gathered = [p for stage in planned.stages for p in gathered_parameters(stage.submod).values()]
        self.meter.watch(p.untyped_storage() for p in gathered)

    def begin_step(self) -> tuple[MemoryMeter, None]:
        return self.meter, None

    def end_step(self) -> None:
        pass


def modules(count: int, mesh: DeviceMesh, reshard: bool | None) -> list[nn.Module]:
    torch.manual_seed(3)
    parts = [nn.Sequential(Block(), Block()) for _ in range(count)]
    if reshard is not None:
        for part in parts:
            for block in part:
                fully_shard(block, mesh=mesh["data"], reshard_after_forward=reshard)
            fully_shard(part, mesh=mesh["data"], reshard_after_forward=reshard)
    return list(parts)


def step(schedule: Any, mine: list[nn.Module], x: Tensor, first: bool, last: bool) -> list[Tensor]:
    for module in mine:
        module.zero_grad(set_to_none=False)
    schedule.step(*[x] * first, **({"target": x} if last else {}), return_outputs=False)
    gradients = [p.grad for module in mine for p in module.parameters()]
    return [g.to_local().clone() if isinstance(g, DTensor) else g.clone() for g in gradients]


def by_torch(folder: Path, mesh: DeviceMesh) -> None:
    """torch's 1F1B, recorded: equal gradients with the recorder and without."""
    group, rank = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
    module = modules(2, mesh, False)[rank]
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(7 + mesh.get_local_rank("data"))
    x = torch.randn(ROWS * MICROBATCHES, WIDTH)
    expected = step(schedule, [module], x, rank == 0, rank == 1)
    recorder = Recorder(schedule, folder, steps=2, skip=1, name="by torch", stages=[stage])
    for _ in range(4):
        assert not recorder.done
        found = step(schedule, [module], x, rank == 0, rank == 1)
        assert all(map(torch.equal, found, expected))
    assert recorder.done
    assert "forward_one_chunk" not in vars(stage)
    assert "step" not in vars(schedule)


def run(
    folder: Path, name: str, placement: list[int], reshard: bool | None, reduce_every: int | None, modes: list[str]
) -> dict[str, Any]:
    """Record, plan, and measure what the plan takes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    count, rank = len(placement), mesh.get_local_rank("pipeline")
    parts, cpu = modules(count, mesh, reshard), torch.device("cpu")
    own = [s for s, device in enumerate(placement) if device == rank]
    stages = [PipelineStage(parts[s], s, count, cpu, group=mesh.get_group("pipeline")) for s in own]
    mine, first, last = [parts[s] for s in own], 0 in own, count - 1 in own
    planned = PlannedSchedule(
        stages,
        recording_schedule(placement, MICROBATCHES, modes=modes),
        loss_fn=nn.functional.mse_loss,
        reduce_every=reduce_every,
    )
    recorder = Recorder(planned, folder / name, steps=2, skip=1, name=name)
    torch.manual_seed(7 + mesh.get_local_rank("data"))
    x = torch.randn(ROWS * MICROBATCHES, WIDTH)
    for _ in range(4):
        expected = step(planned, mine, x, first, last)
    assert recorder.done
    assert planned.observer is None
    dist.barrier()  # all files are there
    recorded = join_records(load_records(folder / name))
    problem = recorded.problem()
    schedule = random_in_modes(problem, seed=5)
    assert planned.replan(schedule if dist.get_rank() == 3 else None)
    assert not planned.replan()
    assert planned.schedule.orders == schedule.orders
    planned.observer = counting = Counting(planned)
    found = step(planned, mine, x, first, last)
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
    peaks = planned_peaks_bytes(planned.program, problem, recorded.message_bytes, recorded.replicas)
    return {
        "error": error,
        "planned_bytes": peaks[rank],
        "measured_bytes": counting.meter.peak_bytes[rank],
        "modes": sorted(set(planned.program.modes.values())),
        "offloads": len(planned.program.offloaded),
        "kinds": sorted({action.kind for action in planned.program.actions()}),
        "gradient_bytes": sum(replica.gradient_bytes for replica in recorded.replicas),
    }


def main(folder: Path, cases: list[dict[str, Any]]) -> None:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    with gloo_group():
        results = [run(folder, **case) for case in cases]
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):  # older ones fail over gloo on subgroups
            by_torch(folder / "torch", init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data")))
        (folder / f"found{dist.get_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
