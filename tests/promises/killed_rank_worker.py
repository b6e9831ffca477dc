"""Runs under torchrun: trains, and kills itself where it is told to, once in each start of the processes.

Usage: killed_rank_worker.py FOLDER. `FOLDER/run.json` says what to train and who is killed where; each start writes its
losses to `FOLDER/losses-START.jsonl`, checkpoints are in `FOLDER/checkpoints`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from optpipe.runtime.stage import Stage
from optpipe.schedule import Schedule
from optpipe.train import (
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    StepReport,
    TrainingConfig,
    train,
)
from optpipe.train.checkpoint.files import Disk


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    run = json.loads((folder / "run.json").read_text())
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for kill in run["kills"][start : start + 1]:
        if kill["rank"] == int(os.environ["RANK"]):
            arm(**kill)
    config = TrainingConfig(
        Schedule.load(folder / "schedule.json"),
        ModelConfig(**run["model"]),
        OptimizerConfig(**run["optimizer"]),
        CheckpointConfig(folder / "checkpoints", every_steps=run["every_steps"]),
        steps=run["steps"],
        data_parallel=run["data_parallel"],
        timeout_seconds=60,
    )
    with (folder / f"losses-{start}.jsonl").open("a") as file:

        def report(step: StepReport) -> None:
            file.write(json.dumps([step.step, step.loss]) + "\n")
            file.flush()

        train(config, report)


def arm(rank: int, step: int, at: str) -> None:
    """Have this process killed in a step: `at` the second microbatch of a stage's op, or in writing a checkpoint."""
    if at == "write_tensors":
        Disk.write_tensors = half_written(step)  # type: ignore[method-assign]
    elif at == "publish":
        Disk.publish = lambda self, partial, final: end()  # type: ignore[method-assign]
    else:
        setattr(Stage, at, killed_in(getattr(Stage, at), step))


def killed_in(op: Callable[..., Any], step: int) -> Callable[..., Any]:
    def killed(stage: Stage, microbatch: int, *arguments: Any) -> Any:
        if stage.random is not None and stage.random.step == step + 1 and microbatch == 1:
            end()
        return op(stage, microbatch, *arguments)

    return killed


def half_written(step: int) -> Callable[..., Any]:
    write = Disk.write_tensors

    def killed(disk: Disk, path: Path, *contents: Any) -> Any:
        written = write(disk, path, *contents)
        if path.parent.name.endswith(f"{step:010d}"):
            os.truncate(path, written.size_bytes // 2)
            end()
        return written

    return killed


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
