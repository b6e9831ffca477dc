"""Runs on every rank: trains the schedules of a folder, whose microbatches are sliced, and writes the results.

Usage: sliced_worker.py FOLDER.
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


def config_of(schedule: Schedule) -> TrainingConfig:
    return TrainingConfig(schedule, ModelConfig("tiny", layers=4, dtype="float64"), steps=2, check=True)


def main(folder: Path) -> None:
    results: dict[str, Any] = {}
    with gloo_group():
        for path in sorted(folder.glob("*.schedule.json")):
            result = train(config_of(Schedule.load(path)))
            results[path.name.removesuffix(".schedule.json")] = asdict(replace(result, schedule=None))
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
