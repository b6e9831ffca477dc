"""Runs under torchrun: trains a schedule to which a better one is found on the way, and writes what became of it.

Usage: online_worker.py FOLDER MODE LENGTHS. Rank 0 alone has a solver.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

import optpipe.train.resolve.callback as online_room
from instances import uniform
from optpipe.train import ModelConfig, OnlineConfig, OptimizerConfig, TrainingConfig, train
from optpipe.train.resolve.callback import Choice
from solver.solve import solve
from tests.optpipe.train.resolve.solvers import Scripted


def main(folder: Path, mode: str, lengths: str) -> None:
    torch.set_num_threads(1)
    online_room.choose = lambda *_: Choice(2.0, 1.0, 0.0)  # times of a busy machine may say anything
    online = OnlineConfig(mode, devices=2, rounds=1, first_step=1, record_steps=2, every_steps=1000, least_gain=0)  # type: ignore[arg-type]
    if lengths == "varying":  # later microbatches are longer than the first, which would set the limit
        online = replace(online, memory_bytes=10**9)
    given = None if mode == "first" else solve(uniform(2, 4), "gpipe")
    config = TrainingConfig(
        given,
        ModelConfig("tiny", dtype="float64", lengths=lengths),  # type: ignore[arg-type]
        OptimizerConfig(clip_norm=0.5),
        online=online,
        steps=12,
        timeout_seconds=120,
    )
    leads = os.environ["RANK"] == "0"
    result = train(config, None, Scripted(["zb-h1"]) if leads else None)
    assert result.schedule is not None
    kinds = [event.kind for event in result.events]
    found = {"losses": result.losses, "kinds": kinds, "method": result.schedule.method}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
