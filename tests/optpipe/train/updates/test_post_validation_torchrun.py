"""The same in processes of their own, over gloo: every bit is that of one process whose updates wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optpipe.train.updates import StepOutcome
from tests.optpipe.train.updates.cases import facts, schedules, synchronous
from tests.torchrun import torchrun

WORKER = Path(__file__).parent / "post_validation_worker.py"


def ranks_of(folder: Path, name: str) -> list[dict[str, Any]]:
    devices = len(schedules()[name].devices)
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(devices)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four processes write, and two."""
    folder = tmp_path_factory.mktemp("post-validation")
    torchrun(WORKER, 4, str(folder), *(name for name, s in schedules().items() if len(s.devices) == 4))
    torchrun(WORKER, 2, str(folder), *(name for name, s in schedules().items() if len(s.devices) == 2))
    return folder


@pytest.mark.torchrun
@pytest.mark.parametrize("name", schedules())
def test_processes_that_do_not_wait_equal_one_that_does(folder: Path, name: str) -> None:
    ranks, (expected, digests) = ranks_of(folder, name), synchronous(name)
    for rank in ranks:
        outcomes = [StepOutcome(**outcome) for outcome in rank["outcomes"]]
        assert facts(outcomes) == facts(expected)
        assert sum(outcome.rolled_back for outcome in outcomes) > 10
    assert {name: digest for rank in ranks for name, digest in rank["digests"].items()} == digests
