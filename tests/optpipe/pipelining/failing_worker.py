"""First call of a PlannedSchedule in which rank 1 of 3 fails: usage failing_worker.py SCHEDULE FOLDER.

FOLDER gets a file for each rank and manner of failing, with the kind of error and its text.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from optpipe.errors import OptPipeError
from optpipe.pipelining import PlannedSchedule

RANK_OF_FAILURE = 1


class Part(nn.Linear):
    """A stage that raises, or whose process ends, or that computes."""

    failing = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.failing == "raises":
            raise ValueError("the layer broke")
        if self.failing == "dies":
            os._exit(9)
        return super().forward(x)


def main() -> None:
    schedule, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for failing in ("raises", "dies"):
        part = Part(4, 4)
        part.failing = failing if rank == RANK_OF_FAILURE else ""
        planned = PlannedSchedule(PipelineStage(part, rank, 3, torch.device("cpu")), schedule, nn.functional.mse_loss)
        x = torch.ones(6, 4)
        try:
            planned.step(*([x] if rank == 0 else []), **({"target": x} if rank == 2 else {}))
        except OptPipeError as error:
            text = json.dumps({"kind": type(error).__name__, "text": str(error)})
            (folder / f"{failing}-{rank}.json").write_text(text)
    os._exit(0)  # the group is broken


if __name__ == "__main__":
    main()
