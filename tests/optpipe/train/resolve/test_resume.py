"""A schedule that was found while training is what a resumed run goes on with."""

from __future__ import annotations

from pathlib import Path

from optpipe.train import CheckpointConfig, ModelConfig, OnlineConfig, TrainingConfig, train
from tests.optpipe.train.resolve.solvers import Scripted


def _config(folder: Path, steps: int) -> TrainingConfig:
    online = OnlineConfig(
        "online", devices=2, microbatches=4, rounds=1, first_step=1, record_steps=1, every_steps=1000, least_gain=0
    )
    checkpoints = CheckpointConfig(folder, every_steps=100)
    model = ModelConfig("tiny", dtype="float64", microbatch_size=1, sequence=8)
    return TrainingConfig(None, model, online=online, checkpoints=checkpoints, steps=steps, device="cpu")


def test_found_before_and_used_after_a_resume(tmp_path: Path) -> None:
    solver = Scripted(["zb-h1"], first="gpipe")
    before = train(_config(tmp_path, 14), None, solver)
    assert before.schedule is not None
    assert before.schedule.method == "zb-h1"
    after = train(_config(tmp_path, 16), None, Scripted([None], first="gpipe"))
    assert after.first_step == 14
    assert len(after.losses) == 2
    assert after.schedule == before.schedule
