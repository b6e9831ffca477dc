"""Runs on every rank: trains the schedules of a folder on microbatches of different sizes, and writes the results.

Usage: unequal_worker.py FOLDER REPLICAS. Each schedule runs with the GPT, "linear, offload" also with stages, data
and a loader of the user's.
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

OWN = "tests.optpipe.train.unequal_stages"
MODELS = {
    "gpt": ModelConfig("tiny", dtype="float64", lengths="varying"),
    "data": ModelConfig(f"{OWN}:build", data=f"{OWN}:data", lengths="varying"),
    "loader": ModelConfig(f"{OWN}:build", loader=f"{OWN}:loader", lengths="varying"),
}


def config_of(schedule: Schedule, model: str, replicas: int) -> TrainingConfig:
    return TrainingConfig(schedule, MODELS[model], steps=3, check=True, data_parallel=replicas)


def main(folder: Path, replicas: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for path in sorted(folder.glob("*.schedule.json")):
        schedule = Schedule.load(path)
        for model in MODELS if path.name.startswith("linear, offload") else ("gpt",):
            result = train(config_of(schedule, model, replicas))
            results[f"{path.name.removesuffix('.schedule.json')}, {model}"] = asdict(replace(result, schedule=None))
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
