"""R14. A rank killed with -9 under torchrun: all start again, go on from the last checkpoint, and end up the same.

Losses are compared bit for bit with those of a run that nothing interrupted, in float64, with clipping active and
updates that do not wait (post-validation).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from instances.schedules import one_f_one_b
from optpipe.schedule import schedule_text
from optpipe.train import ModelConfig, OptimizerConfig, TrainingConfig, train
from optpipe.train.checkpoint.files import steps_in
from tests.sample import some
from tests.torchrun import torchrun

WORKER = Path(__file__).parent / "killed_rank_worker.py"
STEPS, EVERY = 8, 2
MODEL = {"name": "tiny", "dtype": "float64"}
OPTIMIZER = {"clip_norm": 1.9}
"""Below the gradient norm of some of the steps, above that of others."""
TIMEOUT_SECONDS = 300
"""Enough for a busy machine: alone the longest of these takes half a minute."""


@dataclass(frozen=True)
class Case:
    """Ranks that are killed in each start of the processes, and where; the step that each start begins with."""

    processes: int
    kills: tuple[dict[str, Any], ...]
    first_steps: tuple[int, ...]


CASES = {
    "two ranks, killed while they write, then before the rename, then in a backward": Case(
        2,
        (
            {"rank": 1, "step": 4, "at": "write_tensors"},
            {"rank": 0, "step": 4, "at": "publish"},
            {"rank": 1, "step": 5, "at": "backward_input"},
        ),
        (0, 2, 2, 4),
    ),
    "four ranks, killed in a forward, then in a weight gradient": Case(
        4, ({"rank": 2, "step": 3, "at": "forward"}, {"rank": 1, "step": 7, "at": "backward_weight"}), (0, 2, 6)
    ),
}


@pytest.mark.torchrun
@pytest.mark.parametrize("name", some(list(CASES)))
def test_it_goes_on_from_the_last_checkpoint_with_the_same_losses(name: str, tmp_path: Path, forked: Path) -> None:
    case = CASES[name]
    run = {"model": MODEL, "optimizer": OPTIMIZER, "steps": STEPS, "every_steps": EVERY, "data_parallel": 1}
    (tmp_path / "run.json").write_text(json.dumps(run | {"kills": case.kills}))
    (tmp_path / "schedule.json").write_text(schedule_text(one_f_one_b(case.processes, 4)))
    limits = {"timeout_seconds": TIMEOUT_SECONDS, "restarts": len(case.kills)}
    torchrun(forked, WORKER, case.processes, str(tmp_path), **limits)
    starts = [losses_of(path) for path in sorted(tmp_path.glob("losses-*.jsonl"))]
    assert tuple(min(start) for start in starts) == case.first_steps
    wanted = uninterrupted(case.processes)
    for start in starts:
        assert start == {step: wanted[step] for step in start}
    assert {step for start in starts for step in start} == set(range(STEPS))
    assert steps_in(tmp_path / "checkpoints") == [STEPS, STEPS - EVERY]


@cache
def uninterrupted(processes: int) -> dict[int, float]:
    """The losses of a run without checkpoints, all devices in this process."""
    config = TrainingConfig(one_f_one_b(processes, 4), ModelConfig(**MODEL), OptimizerConfig(**OPTIMIZER), steps=STEPS)
    return dict(enumerate(train(config).losses))


def losses_of(path: Path) -> dict[int, float]:
    return dict(json.loads(line) for line in path.read_text().splitlines())
