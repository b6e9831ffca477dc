"""Process group of a worker's ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def gloo_group() -> Iterator[int]:
    """A group over gloo of all ranks, which leave it together; yields the rank. Nothing is awaited after an error."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.barrier()  # a rank that leaves early breaks the connections that others still use
    dist.destroy_process_group()
    gc.collect()  # or gloo's threads outlive the interpreter, which then aborts
