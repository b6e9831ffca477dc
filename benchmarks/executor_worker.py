"""Rank of the executor benchmark: OptPipe's runtime and torch's on the same stages, in turns.

Usage, under torchrun: executor_worker.py FOLDER. The folder holds ``case.json`` and the schedules that it names; each
rank writes ``rankN.results``.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from benchmarks.executor_case import SIZE, WIDTH, Case, batch, stage_module
from optpipe.compile import compile_schedule
from optpipe.runtime import Gloo, MemoryMeter, MessageSpec, Pipeline, Stage
from optpipe.schedule import Schedule

Run = Callable[[MemoryMeter | None], None]
"""Function that runs one step, and counts its memory if given a meter."""

WARM_UP = 3


def main(folder: Path) -> None:
    """Run the case of `folder` as one rank, and write the measurements there."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = Case(**json.loads((folder / "case.json").read_text()))
    runs = {name: _contender(folder, case, name) for name in case.contenders}
    found: dict[str, dict[str, float]] = {name: {"peak_bytes": _peak_bytes(run)} for name, run in runs.items()}
    for run in runs.values():
        for _ in range(WARM_UP):
            run(None)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(case.rounds):  # in turns, so that a busy machine slows all of them
        for name, run in runs.items():
            seconds[name].append(_seconds(run, case.steps))
    for name, rounds in seconds.items():
        host, wall = (min(times) for times in zip(*rounds, strict=True))
        found[name] |= {"host_s": host, "step_s": wall}
    (folder / f"rank{dist.get_rank()}.results").write_text(json.dumps(found))
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()
    gc.collect()  # or gloo's threads outlive the interpreter


def _contender(folder: Path, case: Case, name: str) -> Run:
    schedule, runtime = name.rsplit(", ", 1)
    if runtime == "optpipe":
        return _optpipe(Schedule.load(folder / f"{schedule}.schedule.json"), case)
    return _torch(folder / f"{schedule}.csv", case, own_1f1b=schedule == "1f1b")


def _optpipe(schedule: Schedule, case: Case) -> Run:
    program, rank, last = compile_schedule(schedule), dist.get_rank(), case.devices - 1
    stage = Stage(
        stage_module(rank),
        first=rank == 0,
        loss=nn.functional.mse_loss if rank == last else None,
        gradient_scale=1 / case.microbatches,
    )
    pipeline = Pipeline(program, {rank: stage}, [rank], Gloo(), [MessageSpec((SIZE, WIDTH), torch.float32)] * last)
    inputs, targets = batch(case.microbatches)
    return lambda meter: _ignore(pipeline.run(inputs, targets, meter))


def _torch(csv: Path, case: Case, *, own_1f1b: bool) -> Run:
    rank, last = dist.get_rank(), case.devices - 1
    module = stage_module(rank)
    stage = PipelineStage(module, rank, case.devices, torch.device("cpu"))
    runtime: Any
    if own_1f1b:
        runtime = Schedule1F1B(stage, case.microbatches, loss_fn=nn.functional.mse_loss)
    else:
        runtime = _PipelineScheduleRuntime([stage], case.microbatches, loss_fn=nn.functional.mse_loss)  # type: ignore[no-untyped-call]
        runtime._load_csv(str(csv), format="compute_only")
    inputs, targets = (torch.cat(parts) for parts in batch(case.microbatches))

    def run(meter: MemoryMeter | None) -> None:
        module.zero_grad(set_to_none=False)
        if meter is None:
            _step(runtime, inputs, targets, rank, last)
        else:
            with meter, meter.on(rank):
                _step(runtime, inputs, targets, rank, last)

    return run


def _step(runtime: Any, inputs: Tensor, targets: Tensor, rank: int, last: int) -> None:
    losses: list[Tensor] = []
    runtime.step(*([inputs] if rank == 0 else []), **({"target": targets, "losses": losses} if rank == last else {}))


def _peak_bytes(run: Run) -> int:
    """Peak of the first step, including everything that the runtime allocates for itself."""
    meter = MemoryMeter()
    run(meter)
    return meter.peak_bytes[dist.get_rank()]


def _seconds(run: Run, steps: int) -> tuple[float, float]:
    """CPU time of this thread and elapsed time, as averages per step."""
    dist.barrier()
    host, wall = thread_time(), perf_counter()
    for _ in range(steps):
        run(None)
    return (thread_time() - host) / steps, (perf_counter() - wall) / steps


def _ignore(_: object) -> None:
    """Discard the loss."""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
