"""Runs on every rank: trains the schedules of a folder, whose microbatches are sliced, and writes the results.

Usage: sliced_worker.py FOLDER.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, TrainingConfig, train


def config_of(schedule: Schedule) -> TrainingConfig:
    return TrainingConfig(schedule, ModelConfig("tiny", layers=4, dtype="float64"), steps=3, check=True)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for path in sorted(folder.glob("*.schedule.json")):
        result = train(config_of(Schedule.load(path)))
        results[path.name.removesuffix(".schedule.json")] = asdict(replace(result, schedule=None))
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
