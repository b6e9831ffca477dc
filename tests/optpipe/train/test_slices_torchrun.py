"""Slices of sequences in several processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optpipe.schedule import Schedule
from optpipe.train import train
from tests.optpipe.train.cases import assert_plain_step
from tests.optpipe.train.sliced_worker import config_of
from tests.optpipe.train.test_slices import SCHEDULES
from tests.ranks import RunRanks
from tests.sample import some
from tests.sliced_schedules import seq1f1b_schedule

WORKER = Path(__file__).parent / "sliced_worker.py"
TWO = {name: SCHEDULES[name] for name in some(("unequal slices", "split", "offload", "recomputed ahead"))}


def run(launch: RunRanks, folder: Path, runs: dict[str, Schedule], processes: int) -> dict[str, Any]:
    for name, schedule in runs.items():
        data = schedule.to_data() | {"problem": schedule.problem.to_data()}
        (folder / f"{name}.schedule.json").write_text(json.dumps(data))
    launch(WORKER, processes, str(folder))
    found: dict[str, Any] = json.loads((folder / "rank0.json").read_text())
    return found


@pytest.fixture(scope="module")
def two_ranks(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(run_ranks, tmp_path_factory.mktemp("two"), TWO, 2)


@pytest.mark.torchrun
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_do_what_one_process_does(two_ranks: dict[str, Any], name: str) -> None:
    assert two_ranks[name]["processes"] == 2
    assert_plain_step(two_ranks[name]["check"])
    assert two_ranks[name]["losses"] == list(train(replace(config_of(TWO[name]), check=False)).losses)


@pytest.mark.torchrun
def test_three_ranks_equal_the_plain_step(run_ranks: RunRanks, tmp_path: Path) -> None:
    found = run(run_ranks, tmp_path, {"three": seq1f1b_schedule(3, 3, 3)}, 3)["three"]
    assert found["processes"] == 3
    assert_plain_step(found["check"])
