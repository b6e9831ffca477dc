"""Changing schedules with a process a device: all change between the same two steps, and numbers stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from instances import uniform
from optpipe.train import ModelConfig, OptimizerConfig, TrainingConfig, train
from solver.solve import solve
from tests.ranks import RunRanks

WORKER = Path(__file__).parent / "online_worker.py"


def _ranks(run_ranks: RunRanks, folder: Path, mode: str, lengths: str = "equal") -> list[dict[str, Any]]:
    run_ranks(WORKER, 2, str(folder), mode, lengths)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def plain_losses() -> tuple[float, ...]:
    model, optimizer = ModelConfig("tiny", dtype="float64"), OptimizerConfig(clip_norm=0.5)
    return train(TrainingConfig(solve(uniform(2, 4), "gpipe"), model, optimizer, steps=12)).losses


@pytest.mark.torchrun
@pytest.mark.parametrize("mode", ["off", "first", "online"])
def test_both_processes_run_the_same_schedules_and_lose_as_much(
    run_ranks: RunRanks, tmp_path: Path, mode: str, plain_losses: tuple[float, ...]
) -> None:
    first, second = _ranks(run_ranks, tmp_path, mode)
    assert first["method"] == second["method"] == ("gpipe" if mode == "off" else "zb-h1")
    assert first["losses"] == second["losses"] == pytest.approx(list(plain_losses), rel=1e-10)
    # too few steps for a verdict, which on a busy machine may be either
    assert ("swapped" in first["kinds"]) == ("swapped" in second["kinds"]) == (mode == "online")


@pytest.mark.torchrun
def test_both_processes_learn_the_same_costs_of_lengths_that_vary(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Else they would put microbatches in different orders, and messages would not fit their receives."""
    first, second = _ranks(run_ranks, tmp_path, "online", "varying")
    model, optimizer = ModelConfig("tiny", dtype="float64", lengths="varying"), OptimizerConfig(clip_norm=0.5)
    plain = train(TrainingConfig(solve(uniform(2, 4), "gpipe"), model, optimizer, steps=12)).losses
    assert first["method"] == second["method"]
    assert "swapped" in first["kinds"]
    assert first["losses"] == second["losses"] == pytest.approx(list(plain), rel=1e-10)
