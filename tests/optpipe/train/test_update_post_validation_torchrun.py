"""Post-validation in several processes over gloo: every bit is that of one process whose updates wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instances.schedules import v_wave
from optpipe.train import ModelConfig, OptimizerConfig, TrainingConfig
from optpipe.train.check import reference_step
from optpipe.train.tasks import build_task
from optpipe.train.update import StepOutcome
from tests.optpipe.train.cases import M, decaying
from tests.optpipe.train.update_cases import STEPS, facts, schedules, synchronous
from tests.ranks import RunRanks
from tests.sample import some

WORKER = Path(__file__).parent / "update_post_validation_worker.py"
NAMES = some(list(schedules()))


def config_of(_case: str = "") -> TrainingConfig:
    """Two replicas of one device that has both ends of the model, whose embedding and head are one."""
    return TrainingConfig(
        v_wave(1, M),
        ModelConfig("tiny", sequence=8, microbatch_size=1, dtype="float64", tied=True),
        OptimizerConfig(clip_norm=1.6, learning_rate=1e-2),
        data_parallel=2,
        steps=20,
    )


def ranks_of(folder: Path, name: str) -> list[dict[str, Any]]:
    devices = len(schedules()[name].devices)
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(devices)]


@pytest.fixture(scope="module")
def folder(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results that four processes write, and two."""
    folder = tmp_path_factory.mktemp("post-validation")
    for processes in (4, 2):
        if names := [name for name in NAMES if len(schedules()[name].devices) == processes]:
            run_ranks(WORKER, processes, str(folder), *names)
    return folder


@pytest.mark.torchrun
@pytest.mark.parametrize("name", NAMES)
def test_processes_that_do_not_wait_equal_one_that_does(folder: Path, name: str) -> None:
    ranks, (expected, digests) = ranks_of(folder, name), synchronous(name)
    for rank in ranks:
        outcomes = [StepOutcome(**outcome) for outcome in rank["outcomes"]]
        assert facts(outcomes) == facts(expected)
        assert sum(outcome.rolled_back for outcome in outcomes) > STEPS / 6
    assert {name: digest for rank in ranks for name, digest in rank["digests"].items()} == digests


@pytest.mark.torchrun
def test_replicas_and_tied_weights_count_once(run_ranks: RunRanks) -> None:
    """Norms and losses are those of the plain model, in which the tied weights are one, on the whole batch."""
    reports = run_ranks.train(__name__, 2, ["replicated"])[0]["replicated"]["reports"]
    found, config = [(report["loss"], report["gradient_norm"]) for report in reports], config_of()
    task = build_task(config, 2, M)
    modules = task.build_stages()
    whole = nn.Sequential(*modules)
    optimizer = torch.optim.AdamW(decaying(whole.parameters()), lr=config.optimizer.learning_rate)
    plain, most = [], config.optimizer.clip_norm or 0.0
    for step in range(config.steps):
        loss = reference_step(modules, task.loss, *task.batch(step))
        plain.append((loss, float(nn.utils.clip_grad_norm_(whole.parameters(), most))))
        optimizer.step()
    assert found == [pytest.approx(pair, rel=1e-8) for pair in plain]
    assert 2 < sum(norm > most for _, norm in plain) < 18
