"""Runs on every rank: trains the configurations of a module of tests, and writes the results.

Usage: ranks_worker.py FOLDER MODULE CASE..., where `MODULE.config_of` has the configuration of a case by its name. Each
rank writes results, reports of steps and errors to `FOLDER/rankN.json`, by case. They run in that folder. Several cases
share a group of processes; one starts and ends its own.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from optpipe.errors import TrainingError
from optpipe.train import StepReport, TrainingConfig, leads, train
from tests.gloo import gloo_group


def main(folder: Path, module: str, cases: list[str]) -> None:
    config_of = import_module(module).config_of
    os.chdir(folder)
    with gloo_group() if len(cases) > 1 else nullcontext():
        found = {case: outcome(config_of(case)) for case in cases}
    assert not dist.is_initialized()
    assert leads() == (os.environ["RANK"] == "0")
    Path(f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


def outcome(config: TrainingConfig) -> dict[str, Any]:
    reports: list[StepReport] = []
    try:
        result = train(config, reports.append)
    except TrainingError as error:
        return {"error": str(error)}
    return asdict(replace(result, schedule=None)) | {"reports": [asdict(report) for report in reports]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
