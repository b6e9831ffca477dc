"""Runs on every rank: trains a GPT whose vocabulary layer lies on all devices, and resumes it.

Usage: vocabulary_worker.py FOLDER. Rank 0 writes what it found to `FOLDER/found.json`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from optpipe.train import (
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    StepReport,
    TrainingConfig,
    TrainingResult,
    train,
)
from tests.gloo import gloo_group
from tests.optpipe.compile.vocabulary import vocabulary_schedule

CASES: dict[str, dict[str, Any]] = {
    "two barriers": {"barriers": 2},
    "tied": {"barriers": 1, "tied": True},
}


def config_of(case: str, devices: int) -> TrainingConfig:
    """Four steps, of which the gradients of some, but not of all, are clipped."""
    model = ModelConfig("tiny", layers=4, dtype="float64", tied=CASES[case].get("tied", False))
    optimizer = OptimizerConfig(learning_rate=3e-2, clip_norm=2.5)
    schedule = vocabulary_schedule(devices, 4, CASES[case]["barriers"])
    return TrainingConfig(schedule, model, optimizer, steps=4, check=True, evaluate=2)


def summary(config: TrainingConfig) -> dict[str, Any]:
    reports: list[StepReport] = []
    result: TrainingResult = train(config, report=reports.append)
    rolled_back = [report.rolled_back for report in reports]
    return {"rolled_back": rolled_back} | asdict(replace(result, schedule=None, events=()))


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    with gloo_group() as rank:
        for case in CASES:
            config = config_of(case, dist.get_world_size())
            kept = replace(config, checkpoints=CheckpointConfig(folder / case), check=False)
            train(replace(kept, steps=2))
            found[case] = {"whole": summary(config), "resumed": summary(kept)}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
