"""Runs under torchrun: two replicas of one device with tied weights, clipped. Usage: update_replicas_worker.py FILE."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from optpipe.train import StepReport, train
from tests.optpipe.train.update_cases import replicated


def main(path: Path) -> None:
    torch.set_num_threads(1)
    reports: list[StepReport] = []
    train(replicated(), reports.append)
    if reports:
        path.write_text(json.dumps([asdict(report) for report in reports]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
