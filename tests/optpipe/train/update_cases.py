"""Schedules of one cut into four stages, and runs of the noisy task with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from instances import uniform
from instances.schedules import OFFLOAD, one_f_one_b
from optpipe.compile import compile_schedule
from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, OptimizerConfig, TrainingConfig
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from optpipe.train.update import StepOutcome
from solver.build import build_schedule
from solver.methods import METHODS
from tests.optpipe.train.cases import M, everything
from tests.optpipe.train.update_tasks import NoisyTask
from tests.sample import FULL

STAGES, STEPS = 4, 100 if FULL else 30
WITHOUT_LOSS = (0, 7, 8, 20, STEPS - 1)
"""Steps without a loss: before an optimizer has any state, two in a row, one that only the end of the run settles."""


def published(method: str, devices: int, *, v_shape: bool = False) -> Schedule:
    problem = uniform(devices, M, v_shape=v_shape, offload=OFFLOAD)
    orders = METHODS[method].orders
    assert orders is not None
    return build_schedule(problem, orders(problem), 0.0, method, 0.0)


@cache
def schedules() -> dict[str, Schedule]:
    """On four devices, and the V on two."""
    return {
        "1F1B": published("1f1b", STAGES),
        "ZB-H1": published("zb-h1", STAGES),
        "V": published("zb-v", STAGES // 2, v_shape=True),
        "offload": one_f_one_b(STAGES, M, moved=everything(STAGES)),
    }


def config_of(schedule: Schedule, *, steps: int = STEPS, dtype: str = "float64", **optimizer: Any) -> TrainingConfig:
    """Small batches, a norm that some steps exceed, and steps without a loss skipped."""
    stages = len(schedule.problem.stages)
    chosen: dict[str, Any] = {
        "clip_norm": 2.2,
        "on_not_finite": "skip",
        "learning_rate": 1e-2,
        "warm_up_steps": 5,
        "decay": "cosine",
    }
    chosen["decay_vectors"] = True
    return TrainingConfig(
        schedule,
        model=ModelConfig(name="tiny", layers=max(STAGES, stages), sequence=8, microbatch_size=1, dtype=dtype),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(**chosen | optimizer),  # type: ignore[arg-type]
        steps=steps,
    )


def noisy_model(
    config: TrainingConfig, launch: Launch, *, optimistic: bool, without_loss: Sequence[int] = WITHOUT_LOSS
) -> Model:
    assert config.schedule is not None
    program = compile_schedule(config.schedule)
    task = NoisyTask(config, len(program.placement), program.microbatches, without_loss)
    return Model(config, program, launch, optimistic=optimistic, task=task)


def run(model: Model) -> list[StepOutcome]:
    """All steps of the run, to where nothing is pending."""
    outcomes = []
    for step in range(model.step_number, model.config.steps):
        outcomes += model.step(model.task.batch(step))
    return outcomes + model.settle()


@cache
def synchronous(name: str) -> tuple[list[StepOutcome], dict[str, str]]:
    """All steps with every update waiting for its sums, and the digests of what they lead to."""
    schedule = schedules()[name]
    model = noisy_model(config_of(schedule), Launch(len(schedule.devices)), optimistic=False)
    return run(model), digests_of(model)


def facts(outcomes: Sequence[StepOutcome]) -> list[StepOutcome]:
    """Without what depends on the way: the time, and whether something had to be undone. NaN becomes equal to NaN."""
    return [
        replace(o, seconds=0.0, rolled_back=False, **({"loss": -1.0, "gradient_norm": -1.0} if o.skipped else {}))
        for o in outcomes
    ]


def state_of(model: Model) -> dict[str, Tensor]:
    """Everything that training changes: parameters, buffers, optimizer state."""
    state: dict[str, Tensor] = {}
    for s, stage in model.stages.items():
        module, optimizer = stage.module, model.optimizers[s]
        state |= {f"{s}.{name}": tensor.clone() for name, tensor in module.state_dict().items()}
        for name, parameter in module.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"{s}.{name}.{key}"] = torch.as_tensor(value).clone()
    return state


def digests_of(model: Model) -> dict[str, str]:
    """By name, of every bit of `state_of`."""
    return {name: sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in state_of(model).items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
