"""Microbatches of different sizes in several processes, which know all sizes without telling one another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from instances.schedules import one_f_one_b
from optpipe.schedule import Schedule
from optpipe.train import train
from tests.optpipe.train.cases import M, assert_plain_step, everything, schedules
from tests.optpipe.train.test_unequal import FACTORS, ORDER, SCHEDULES
from tests.optpipe.train.unequal_worker import config_of
from tests.ranks import RunRanks
from tests.sample import some
from tests.unequal_schedules import with_factors

WORKER = Path(__file__).parent / "unequal_worker.py"
TWO = {name: SCHEDULES[name] for name in ("linear, offload", *some(("V", "recomputed")))}

Ranks = list[dict[str, Any]]


def run(launch: RunRanks, folder: Path, runs: dict[str, Schedule], processes: int, replicas: int = 1) -> Ranks:
    for name, schedule in runs.items():
        data = schedule.to_data() | {"problem": schedule.problem.to_data()}
        (folder / f"{name}.schedule.json").write_text(json.dumps(data))
    launch(WORKER, processes, str(folder), str(replicas))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def two_ranks(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run(run_ranks, tmp_path_factory.mktemp("two"), TWO, 2)


@pytest.mark.torchrun
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_do_what_one_process_does(two_ranks: Ranks, name: str) -> None:
    """Gradients equal to the plain step, peaks as planned, loss by loss."""
    found = two_ranks[0][f"{name}, gpt"]
    assert found["processes"] == 2
    assert_plain_step(found["check"])
    assert found["losses"] == list(train(replace(config_of(TWO[name], "gpt", 1), check=False)).losses)


@pytest.mark.torchrun
@pytest.mark.parametrize("model", ["data", "loader"])
def test_two_ranks_read_batches_of_ones_own(two_ranks: Ranks, model: str) -> None:
    found = two_ranks[0][f"linear, offload, {model}"]
    assert found["check"]["failures"] == []
    alone = replace(config_of(TWO["linear, offload"], model, 1), check=False)
    assert found["losses"] == list(train(alone).losses)


@pytest.mark.torchrun
def test_three_ranks_equal_the_plain_step(run_ranks: RunRanks, tmp_path: Path) -> None:
    offloading = one_f_one_b(3, M, moved=everything(3))
    [found, *_] = run(run_ranks, tmp_path, {"three": with_factors(offloading, FACTORS, ORDER)}, 3)
    assert found["three, gpt"]["processes"] == 3
    assert_plain_step(found["three, gpt"]["check"])


@pytest.mark.torchrun
def test_replicas_put_their_own_microbatches_in_order(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Two replicas of two devices: one batch, cut into parts of different lengths; gradients are those of all of it."""
    [found, *_] = run(run_ranks, tmp_path, {"linear": schedules(2)["linear"]}, 4, replicas=2)
    assert found["linear, gpt"]["processes"] == 4
    assert_plain_step(found["linear, gpt"]["check"])
