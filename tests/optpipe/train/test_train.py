"""Training in one process: the plain step's gradients and losses, the planned memory, and a loss that falls."""

from __future__ import annotations

import os
from itertools import product
from random import Random

import pytest
import torch
from torch import nn

from instances.schedules import one_f_one_b
from optpipe.compile import compile_schedule
from optpipe.errors import RunFailedError
from optpipe.train import CheckResult, ModelConfig, OptimizerConfig, StepReport, TrainingConfig, TrainingResult, train
from optpipe.train.check import gradient_error, reference_step
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from optpipe.train.tasks import build_task
from tests.optpipe.runtime.schedules import random_placement, random_schedule
from tests.optpipe.train.cases import MAX_ERROR, assert_plain_step, decaying, schedules
from tests.sample import some

SCHEDULES = schedules(2)


def checked(result: TrainingResult) -> CheckResult:
    assert result.check is not None
    return result.check


@pytest.mark.parametrize(("name", "dtype"), some([*product(SCHEDULES, MAX_ERROR)]))
def test_a_schedule_equals_the_plain_step_in_the_planned_memory(name: str, dtype: str) -> None:
    config = TrainingConfig(SCHEDULES[name], ModelConfig("tiny", dtype=dtype), steps=1, check=True)  # type: ignore[arg-type]
    assert_plain_step(train(config).check, dtype)


@pytest.mark.parametrize("placement", ["linear", "V"])
def test_offload_changes_no_bit_of_the_gradients_and_lowers_the_peak(placement: str) -> None:
    found = []
    for name in (placement, f"{placement}, offload"):
        config = TrainingConfig(SCHEDULES[name], ModelConfig("tiny"), steps=1, check=True)
        model = Model(config, compile_schedule(SCHEDULES[name]), Launch(len(SCHEDULES[name].devices)))
        model.pipeline.run(*model.task.batch(0))
        gradients = [p.grad for s in model.stages.values() for p in s.module.parameters() if p.grad is not None]
        found.append((gradients, checked(train(config)).devices))
    (plain, without), (offloaded, with_offload) = found
    assert len(plain) == len(offloaded) > 20
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    assert with_offload[0].peak_bytes < without[0].peak_bytes
    assert with_offload[0].host_peak_bytes > 0 == without[0].host_peak_bytes


@pytest.mark.parametrize("seed", some(range(60)))
def test_random_schedules_equal_the_plain_step(seed: int) -> None:
    """Any placement, order, mix of BW and B + W, and set of offloads; nothing lives after a step."""
    schedule = random_schedule(random_placement(Random(seed), microbatches=3), seed)
    config = TrainingConfig(
        schedule, ModelConfig("tiny", dtype="float64", microbatch_size=1, sequence=8), steps=1, seed=seed, check=True
    )
    check = checked(train(config))
    assert check.max_gradient_error <= 1e-12
    for device in check.devices:
        assert device.live_bytes == (0, 0)
        assert device.peak_bytes == pytest.approx(device.planned_peak_bytes, rel=0.02)


def test_random_schedules_offload_and_split() -> None:
    """The schedules above hold what they are there for."""
    programs = [
        compile_schedule(random_schedule(random_placement(Random(seed), microbatches=3), seed)) for seed in range(60)
    ]
    kinds = [action.kind for program in programs for action in program.actions()]
    assert min(kinds.count(kind) for kind in ("B", "BW", "O", "SEND_F")) > 50


def test_losses_are_those_of_plain_training() -> None:
    """Five steps of AdamW, every loss equal."""
    config = TrainingConfig(SCHEDULES["V, offload"], ModelConfig("tiny", dtype="float64"), steps=5)
    task = build_task(config, 4, SCHEDULES["V, offload"].problem.microbatches)
    modules = task.build_stages()
    optimizer = torch.optim.AdamW(decaying(nn.Sequential(*modules).parameters()), lr=config.optimizer.learning_rate)
    plain = []
    for step in range(5):
        plain.append(reference_step(modules, task.loss, *task.batch(step)))
        optimizer.step()
    assert train(config).losses == pytest.approx(plain, rel=1e-9)


def test_a_check_changes_nothing() -> None:
    losses = [
        train(TrainingConfig(SCHEDULES["linear"], ModelConfig("tiny"), steps=2, check=check)).losses
        for check in (False, True)
    ]
    assert losses[0] == losses[1]


def test_the_loss_falls_and_every_step_is_reported() -> None:
    reports: list[StepReport] = []
    config = TrainingConfig(SCHEDULES["linear, offload"], ModelConfig("tiny"), OptimizerConfig(learning_rate=1e-2))
    result = train(config, reports.append)
    assert [r.step for r in reports] == list(range(20))
    assert tuple(r.loss for r in reports) == result.losses
    assert tuple(r.seconds for r in reports) == result.step_seconds
    assert result.losses[0] == pytest.approx(5.55, abs=0.1), "ln 256: it knows nothing"
    assert sum(result.losses[-5:]) / 5 < 4.0
    assert result.check is None
    assert result.processes == 1


def test_a_core_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless OMP_NUM_THREADS asks for all; and torch's setting comes back."""
    cores = os.cpu_count() or 1
    config = TrainingConfig(one_f_one_b(1, 1), ModelConfig("tiny"), steps=1)
    seen: list[int] = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(cores)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        train(config, lambda _: seen.append(torch.get_num_threads()))
        monkeypatch.setenv("OMP_NUM_THREADS", str(cores))
        train(config, lambda _: seen.append(torch.get_num_threads()))
        assert torch.get_num_threads() == cores
    finally:
        torch.set_num_threads(before)
    assert seen == [max(1, cores - 1), cores]


def test_a_loss_that_leaves_the_numbers_ends_the_run() -> None:
    config = TrainingConfig(one_f_one_b(1, 1), ModelConfig("tiny"), OptimizerConfig(learning_rate=1e30), steps=50)
    with pytest.raises(
        RunFailedError, match=r"the loss is (nan|inf) at step \d+ with learning_rate 1e\+30\. Maybe lower"
    ):
        train(config)


def test_gradient_error_is_relative_to_the_largest_entry() -> None:
    plain = torch.tensor([4.0, 0.0, -8.0])
    assert gradient_error(torch.tensor([4.0, 2.0, -8.0]), plain) == 0.25
    assert gradient_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert gradient_error(torch.ones(2), torch.zeros(2)) == float("inf")
    assert gradient_error(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")
