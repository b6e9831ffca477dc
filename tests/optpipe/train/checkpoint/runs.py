"""Short runs of the tiny GPT in one process, with what acts between their steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from instances.schedules import one_f_one_b
from optpipe.compile import compile_schedule
from optpipe.train import CheckpointConfig, ModelConfig, TrainingConfig
from optpipe.train.checkpoint.callback import CheckpointCallback, Interrupts
from optpipe.train.checkpoint.files import Disk
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from tests.optpipe.train.checkpoint import normed_stages

STEPS = 6

NORMED: dict[str, Any] = {
    "schedule": one_f_one_b(1, 2),
    "name": f"{normed_stages.__name__}:build",
    "data": f"{normed_stages.__name__}:batch",
    "dtype": "float32",
}
"""A stage with running statistics; two replicas take two microbatches each."""


def config_of(folder: Path | None, **changes: Any) -> TrainingConfig:
    """Two stages, `STEPS` steps in float64, a checkpoint every two; `changes` are fields of groups or of the whole."""
    groups = {
        "model": ModelConfig(
            **_taken(
                changes,
                "name",
                "data",
                "dtype",
                "autocast",
                "tied",
                "layers",
                "cut",
                "lengths",
                default={"name": "tiny", "dtype": "float64"},
            )
        ),
        "checkpoints": CheckpointConfig(
            folder, **_taken(changes, "keep", "resume", "every_steps", "asynchronous", default={"every_steps": 2})
        ),
    }
    return replace(TrainingConfig(one_f_one_b(2, 2), steps=STEPS), **groups, **changes)


def _taken(changes: dict[str, Any], *names: str, default: dict[str, Any]) -> dict[str, Any]:
    return default | {name: changes.pop(name) for name in names if name in changes}


@dataclass
class Run:
    """A model between steps, and the losses of the steps that this run did."""

    model: Model
    checkpoints: CheckpointCallback
    losses: dict[int, float]


def run(
    config: TrainingConfig,
    *,
    disk: Disk | None = None,
    until: int | None = None,
    before: Callable[[int], None] | None = None,
) -> Run:
    """Resume, train to the end or `until` a step, and act at each boundary; `before` is called before each step."""
    assert config.schedule is not None
    program = compile_schedule(config.schedule, reduce_gradients=config.sums_gradients)
    model = Model(config, program, Launch(len(program.devices)))
    with Interrupts() as interrupts:
        found = Run(model, CheckpointCallback(config, model, interrupts, disk), {})
        start = found.checkpoints.resume()
        last = config.steps if until is None else until
        for step in range(start, config.steps + 1):
            if step > start and (found.checkpoints.is_due(step) or found.checkpoints.requests()):
                found.checkpoints.on_step_boundary(step)
            if step >= last or found.checkpoints.stopped:
                break
            if before:
                before(step)
            [outcome] = model.step(model.task.batch(step))
            found.losses[step] = outcome.loss
    return found


def check_resumed_losses(folder: Path, **settings: Any) -> None:
    """Assert that a run that ends in step 5, and is resumed from step 4, has the losses of an uninterrupted one."""
    whole = run(config_of(None, **settings)).losses
    before = run(config_of(folder, **settings), until=5).losses
    after = run(config_of(folder, **settings, resume="must")).losses
    assert list(after) == [4, 5]
    assert before | after == whole
    assert after[4] == before[4]
