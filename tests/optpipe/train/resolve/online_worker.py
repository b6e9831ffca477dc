"""Runs on every rank: trains schedules for which a better one is found meanwhile, and writes the outcome of each.

Usage: online_worker.py FOLDER. Rank 0 alone has a solver.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import optpipe.train.resolve.callback as online_room
from instances import uniform
from optpipe.train import ModelConfig, OnlineConfig, OptimizerConfig, TrainingConfig, train
from optpipe.train.resolve.callback import Choice
from solver.solve import solve
from tests.gloo import gloo_group
from tests.optpipe.train.resolve.solvers import Scripted

ONLINE: dict[str, dict[str, Any]] = {
    "off": {},
    "first": {"mode": "first", "devices": 2},
    "online": {"mode": "online"},
    "varying": {"mode": "online", "memory_bytes": 10**9},  # later microbatches are longer than the first
}


def config_of(case: str, online: OnlineConfig | None = None) -> TrainingConfig:
    """The run of a case, or the same one that only runs the given schedule."""
    model = ModelConfig("tiny", dtype="float64", lengths="varying" if case == "varying" else "equal")
    given = None if case == "first" and online else solve(uniform(2, 4), "gpipe")
    optimizer = OptimizerConfig(clip_norm=0.5)
    return TrainingConfig(given, model, optimizer, online=online or OnlineConfig(), steps=8, timeout_seconds=120)


def main(folder: Path) -> None:
    online_room.choose = lambda *_: Choice(2.0, 1.0, 0.0)  # times of a busy machine may say anything
    found = {}
    with gloo_group() as rank:
        for case, how in ONLINE.items():
            online = OnlineConfig(**how, rounds=1, first_step=1, record_steps=2, every_steps=1000, least_gain=0)
            result = train(config_of(case, online), None, Scripted(["zb-h1"]) if rank == 0 else None)
            assert result.schedule is not None
            kinds = [event.kind for event in result.events]
            found[case] = {"losses": result.losses, "kinds": kinds, "method": result.schedule.method}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
