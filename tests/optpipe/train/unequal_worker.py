"""Runs on every rank: trains the schedules of a folder on microbatches of different sizes, and writes the results.

Usage: unequal_worker.py FOLDER REPLICAS. Each schedule runs with the GPT, "linear, offload" also with stages, data
and a loader of the user's.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, TrainingConfig, train
from tests.gloo import gloo_group

OWN = "tests.optpipe.train.unequal_stages"
MODELS = {
    "gpt": ModelConfig("tiny", dtype="float64", lengths="varying"),
    "data": ModelConfig(f"{OWN}:build", data=f"{OWN}:data", lengths="varying"),
    "loader": ModelConfig(f"{OWN}:build", loader=f"{OWN}:loader", lengths="varying"),
}


def config_of(schedule: Schedule, model: str, replicas: int) -> TrainingConfig:
    return TrainingConfig(schedule, MODELS[model], steps=2, check=True, data_parallel=replicas)


def main(folder: Path, replicas: int) -> None:
    results: dict[str, Any] = {}
    with gloo_group():
        for path in sorted(folder.glob("*.schedule.json")):
            schedule = Schedule.load(path)
            for model in MODELS if path.name.startswith("linear, offload") else ("gpt",):
                result = train(config_of(schedule, model, replicas))
                results[f"{path.name.removesuffix('.schedule.json')}, {model}"] = asdict(replace(result, schedule=None))
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
