"""Runs under torchrun: trains until a signal ends it; each rank then writes why and where to `FOLDER/rankN.txt`.

Usage: endless_worker.py FOLDER. Rank 0 makes `FOLDER/begun` once it has done a step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from optpipe.train import train
from tests.optpipe.train.checkpoint.runs import config_of


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    config = config_of(folder / "checkpoints", steps=10**6, every_steps=10**6)
    result = train(config, lambda step: (folder / "begun").touch())
    (folder / f"rank{os.environ['RANK']}.txt").write_text(str(result.stopped))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
