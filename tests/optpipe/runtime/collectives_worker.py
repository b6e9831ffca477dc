"""Runs on every rank: exchanges over gloo, and writes what came and which memory was not free after it.

Usage: collectives_worker.py FOLDER.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

from optpipe.runtime.collectives import GlooCollectives
from optpipe.runtime.messages import MessageSpec

ROUNDS, SIZE = 300, 5000


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, collectives, kept = dist.get_rank(), GlooCollectives(), 0
    spec = MessageSpec((SIZE,), torch.float64)
    for n in range(ROUNDS):
        own = torch.full((SIZE,), float(rank + n), dtype=torch.float64)
        came = collectives.broadcast(rank, 0, own if rank == 0 else None, spec).wait()
        assert (came == n).all()
        gathered = collectives.all_gather(rank, own).wait()
        assert [float(part[0]) for part in gathered] == [float(r + n) for r in range(dist.get_world_size())]
        receipt = collectives.reduce(rank, 1, own)
        total = None if receipt is None else receipt.wait()
        assert total is None or (total == sum(r + n for r in range(dist.get_world_size()))).all()
        storages = [weakref.ref(t.untyped_storage()) for t in (came, *gathered, own)]
        del came, gathered, own, total, receipt
        kept += sum(storage() is not None for storage in storages)
    collectives.finish()
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    (folder / f"rank{rank}.json").write_text(json.dumps(kept))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
