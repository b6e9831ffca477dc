"""Ways of running models of which stages share parameters, each by a name such as "gpt2, V, clipped"."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from instances import uniform
from instances.schedules import one_f_one_b, v_wave
from optpipe.train import CheckpointConfig, ModelConfig, OnlineConfig, OptimizerConfig, TrainingConfig
from solver.solve import solve
from tests.optpipe.train.shared_stages import MICROBATCHES as M
from tests.optpipe.train.shared_stages import plain_losses

STEPS, ONLINE_STEPS = 6, 10
"""Online, another schedule has to be found and taken in time."""

CLIP = {"gpt2": 1.75, "llama": 1.75, "everywhere": 8.0, "modules": 3.0}

SCHEDULES = {
    "linear": lambda: one_f_one_b(4, M),
    "linear in 2": lambda: one_f_one_b(2, M),
    "V": lambda: v_wave(2, M),
    "replicas": lambda: one_f_one_b(2, M // 2),
    "replicas of a V": lambda: v_wave(2, M // 2),
    "online": lambda: solve(uniform(2, M), "gpipe"),
}


def config_of(case: str, folder: Path | None = None) -> TrainingConfig:
    """The run of a case; `folder` is for checkpoints, of which one of four devices has written the first half."""
    name, way, *more = case.split(", ")
    schedule = SCHEDULES[way]()
    stages = f"tests.optpipe.train.shared_stages:{name}_in_{len(schedule.problem.stages)}"
    return TrainingConfig(
        schedule,
        ModelConfig(stages, data="tests.optpipe.train.shared_stages:batch"),
        optimizer_of(case),
        CheckpointConfig(folder / name, resume="must") if folder and "resumed" in more else CheckpointConfig(),
        OnlineConfig("online", rounds=1, first_step=1, record_steps=2, least_gain=0)
        if way == "online"
        else OnlineConfig(),
        steps=steps_of(case),
        data_parallel=2 if "replicas" in way else 1,
        check="clipped" not in more,
        timeout_seconds=120,
    )


def steps_of(case: str) -> int:
    return ONLINE_STEPS if "online" in case else STEPS


def optimizer_of(case: str) -> OptimizerConfig:
    """Its norm is exceeded in some steps, so that updates that did not wait are undone."""
    name, *more = case.split(", ")
    return OptimizerConfig(learning_rate=1e-2, clip_norm=CLIP[name] if "clipped" in more else None)


@cache
def plain(case: str) -> tuple[list[float], int]:
    """Losses and parameters of plain training of the same model."""
    return plain_losses(case.split(", ")[0], optimizer_of(case), steps_of(case))
