"""Runs on every rank: trains every schedule of a folder, and writes the results as JSON.

Usage: torchrun_worker.py FOLDER STEPS [shared]. With `shared` one process group serves all runs; without, `train`
starts and ends its own, and only one run is possible.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from optpipe.errors import TrainingError
from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, StepReport, TrainingConfig, leads, train


def dtype_of(name: str) -> Literal["float32", "float64"]:
    """Each schedule trains in one precision; those with offload and those without it in the same."""
    return "float32" if name.startswith("linear") else "float64"


def main(folder: Path, steps: int, *, shared: bool) -> None:
    torch.set_num_threads(1)
    if shared:
        dist.init_process_group("gloo")
    results = {}
    for path in sorted(folder.glob("*.schedule.json")):
        name = path.name.removesuffix(".schedule.json")
        model = ModelConfig("tiny", dtype=dtype_of(name))
        reports: list[StepReport] = []
        result = train(TrainingConfig(Schedule.load(path), model, steps=steps, check=True), reports.append)
        results[name] = asdict(replace(result, schedule=None)) | {"reports": [report.step for report in reports]}
    if shared:
        results["disagreement"] = {"error": disagreement(path)}
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
    results["group left"] = {"alive": dist.is_initialized()}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
    assert leads() == (os.environ["RANK"] == "0")


def disagreement(path: Path) -> str:
    """The error when ranks are started with different seeds."""
    try:
        train(TrainingConfig(Schedule.load(path), ModelConfig("tiny"), seed=int(os.environ["RANK"])))
    except TrainingError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), shared="shared" in sys.argv)
