"""Changing schedules with a process a device: all change between the same two steps, and numbers stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optpipe.train import train
from tests.optpipe.train.resolve.online_worker import ONLINE, config_of
from tests.ranks import RunRanks

WORKER = Path(__file__).parent / "online_worker.py"


@pytest.fixture(scope="module")
def ranks(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("online")
    run_ranks(WORKER, 2, str(folder))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.torchrun
@pytest.mark.parametrize("case", ONLINE)
def test_both_processes_run_the_same_schedules_and_lose_as_much(ranks: list[Any], case: str) -> None:
    """Also with lengths that vary, else they would put microbatches in different orders."""
    first, second = (rank[case] for rank in ranks)
    assert first["method"] == second["method"]
    if case != "varying":  # what it comes back to depends on the times of steps
        assert first["method"] == ("gpipe" if case == "off" else "zb-h1")
    assert first["losses"] == second["losses"] == pytest.approx(list(train(config_of(case)).losses), rel=1e-10)
    # too few steps for a verdict, which on a busy machine may be either
    assert [("swapped" in rank["kinds"]) for rank in (first, second)] == [case in ("online", "varying")] * 2
