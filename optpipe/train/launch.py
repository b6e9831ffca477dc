"""One process or many: under torchrun each process runs the device of its rank, and they talk over gloo.

Between processes go tensors and JSON, nothing pickled.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from optpipe.errors import TrainingError


@dataclass(frozen=True)
class Launch:
    """This process among those of the run."""

    rank: int = 0
    world: int = 1
    distributed: bool = False

    def devices(self, count: int) -> list[int]:
        """The devices, of `count`, that this process runs."""
        return [self.rank] if self.distributed else list(range(count))

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all processes, by rank, in every process."""
        if not self.distributed:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(lengths, torch.tensor([len(text)]))
        longest = max(int(length) for length in lengths)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))))
        return [json.loads(bytes(text[: int(length)].tolist())) for text, length in zip(texts, lengths, strict=True)]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes of equally shaped tensors."""
        if self.distributed:
            dist.all_reduce(values)
        return values


def leads() -> bool:
    """Whether this process is the one that prints: rank 0 under torchrun, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def one_core_left() -> Iterator[None]:
    """Within: torch leaves one core to others where it would take all, unless OMP_NUM_THREADS says how many to take.

    Its threads spin until the last of them is done, so if any other process is busy on one of their cores, every
    operator waits for that core's next time slice: on two cores beside one busy process a step of the small model
    took 15 s with two threads and 1.2 s with one (alone: 0.7 s with two).
    """
    before = torch.get_num_threads()
    if before == os.cpu_count() and before > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(before - 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def launched(devices: int, timeout_seconds: float) -> Iterator[Launch]:
    """The launch for a schedule of so many devices.

    Starts a process group under torchrun, and ends it at exit; one that the caller has started is used and left.
    Raises TrainingError where the number of processes is not the number of devices.
    """
    if not under_torchrun():
        yield Launch()
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != devices:
        raise TrainingError(
            f"WORLD_SIZE is {world} but the schedule has {devices} devices. "
            f"Maybe start it with torchrun --nproc-per-node {devices}, or without torchrun to run all in one process."
        )
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
    try:
        yield Launch(rank, world, distributed=True)
        if own:
            dist.barrier()  # nobody takes the group down while another still talks
    finally:
        if own:
            dist.destroy_process_group()
            gc.collect()  # works in circles of references keep gloo's threads alive into the interpreter's end
