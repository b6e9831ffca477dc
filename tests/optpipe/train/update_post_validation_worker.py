"""Runs under torchrun: all steps with each schedule named, updates waiting for no other process.

Usage: update_post_validation_worker.py FOLDER NAME... ; each rank writes outcomes and digests as FOLDER/NAME.RANK.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from optpipe.train.launch import launched
from tests.optpipe.train.update_cases import config_of, digests_of, noisy_model, run, schedules


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    devices = len(schedules()[names[0]].devices)
    with launched(devices, timeout_seconds=120) as launch:
        for name in names:
            model = noisy_model(config_of(schedules()[name]), launch, optimistic=True)
            found = {"outcomes": [asdict(outcome) for outcome in run(model)], "digests": digests_of(model)}
            (folder / f"{name}.{launch.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
