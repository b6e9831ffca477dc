"""Runs under torchrun on two processes: interrupted and resumed runs, and a disk that fails one of them.

Usage: torchrun_worker.py FOLDER. Each rank writes what it found to `FOLDER/rankN.json`.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from instances.schedules import one_f_one_b
from optpipe.runtime.stage import Stage
from optpipe.train import TrainingConfig, TrainingResult, train
from optpipe.train.checkpoint.files import Disk, final_path, read_tensors, steps_in
from tests.gloo import gloo_group
from tests.optpipe.train.checkpoint.runs import NORMED, config_of

RANK = int(os.environ["RANK"])


def main(folder: Path) -> None:
    with gloo_group():
        found = {
            "two devices": interrupted(config_of(folder / "devices")),
            "two replicas": interrupted(
                config_of(folder / "replicas", schedule=one_f_one_b(1, 2), layers=2, data_parallel=2)
            ),
            "statistics": interrupted(config_of(folder / "statistics", data_parallel=2, evaluate=2, **NORMED)),
            "from one process": summary(train(config_of(folder / "alone", resume="must"))),
            "full disk": full_disk(config_of(folder / "full", keep=1)),
            "full disk, asynchronous": full_disk(config_of(folder / "full beside", keep=1, asynchronous=True)),
            "one slow": one_slow(config_of(folder / "slow", keep=9, asynchronous=True)),
            "sharded": sharded(folder / "alone"),
        }
        (folder / f"rank{RANK}.json").write_text(json.dumps(found))


def interrupted(config: TrainingConfig) -> dict[str, Any]:
    """A run without checkpoints; one in whose step 2 one process gets a signal; and one that goes on from there."""
    whole = train(replace(config, checkpoints=config_of(None).checkpoints))
    with signal_in_step(2):
        first = train(config)
    return {"whole": summary(whole), "first": summary(first), "second": summary(train(config))}


@contextmanager
def signal_in_step(step: int) -> Iterator[None]:
    """Within: rank 1 alone gets SIGTERM in this step."""
    forward = Stage.forward

    def signalled(stage: Stage, microbatch: int, *arguments: Any, **options: Any) -> Any:
        if RANK == 1 and microbatch == 1 and stage.random is not None and stage.random.step == step + 1:
            signal.raise_signal(signal.SIGTERM)
        return forward(stage, microbatch, *arguments, **options)

    Stage.forward = signalled  # type: ignore[method-assign]
    try:
        yield
    finally:
        Stage.forward = forward  # type: ignore[method-assign]


def full_disk(config: TrainingConfig) -> dict[str, Any]:
    """A run in which rank 1 cannot write its stage of the checkpoint of step 4, and those that are there after it."""
    write = Disk.write_tensors

    def full(disk: Disk, path: Path, *contents: Any) -> Any:
        if RANK == 1 and path.parent.name.endswith("4"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(disk, path, *contents)

    Disk.write_tensors = full  # type: ignore[method-assign]
    found = summary(train(replace(config, steps=5)))
    Disk.write_tensors = write  # type: ignore[method-assign]
    assert config.checkpoints.folder is not None
    dist.barrier()  # rank 0 deletes old ones while the others go on
    return found | {"there": sorted(path.name for path in config.checkpoints.folder.iterdir())}


def one_slow(config: TrainingConfig) -> dict[str, Any]:
    """A run in which rank 1 writes its stage of step 2 only in its step 3, in which it sees what is published."""
    write, folder = Disk.write_tensors, config.checkpoints.folder
    assert folder is not None
    goes_on = threading.Event()
    there: list[list[str]] = []

    def slow(disk: Disk, path: Path, *contents: Any) -> Any:
        if RANK == 1 and path.parent.name.endswith("2"):
            assert goes_on.wait(60)
        return write(disk, path, *contents)

    def before(stage: Stage, microbatch: int, *arguments: Any, **options: Any) -> Any:
        if microbatch == 0 and stage.random is not None and stage.random.step == 4:
            there.append(sorted(path.name for path in folder.iterdir()))
            goes_on.set()
        return forward(stage, microbatch, *arguments, **options)

    forward = Stage.forward
    Disk.write_tensors, Stage.forward = slow, before  # type: ignore[method-assign]
    found = summary(train(config))
    Disk.write_tensors, Stage.forward = write, forward  # type: ignore[method-assign]
    dist.barrier()
    return found | {"in step 3": there[0], "there": sorted(path.name for path in folder.iterdir())}


def sharded(folder: Path) -> dict[str, Any]:
    """A weight of the checkpoint, loaded by torch as FSDP lays it out: each process has half of its rows."""
    path = final_path(folder, max(steps_in(folder)))
    mesh = init_device_mesh("cpu", (2,))
    name = "layers.1.widen.weight"
    empty = distribute_tensor(torch.zeros(128, 32, dtype=torch.float64), mesh, [Shard(0)])
    dcp.load({name: empty}, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
    whole = read_tensors(path / "stage-0001.safetensors")[name]
    return {"equal": torch.equal(empty.to_local(), whole[64 * RANK : 64 * (RANK + 1)])}


def summary(result: TrainingResult) -> dict[str, Any]:
    found = {"first_step": result.first_step, "losses": result.losses, "stopped": result.stopped}
    return found | {"evaluation_loss": result.evaluation_loss}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
