"""A check compares the same step, whatever the stages draw, keep or leave without a gradient, and changes none."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from instances.schedules import OFFLOAD, one_f_one_b
from optpipe.compile import compile_schedule
from optpipe.errors import TrainingError
from optpipe.runtime import Stage
from optpipe.schedule import Schedule, schedule_text
from optpipe.train import CheckResult, ModelConfig, OutputConfig, StepReport, TrainingConfig, train
from optpipe.train.check import gradient_errors, reference_step
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from tests.ranks import RunRanks
from tests.recomputing import random_executable

SCHEDULE = one_f_one_b(2, 2)
STAGES = "tests.optpipe.train.odd_stages"
MAIN = Path(__file__).parents[1] / "cli" / "main_worker.py"


def config(stages: str, *, check: bool = False, trace_step: int | None = None, evaluate: int = 0) -> TrainingConfig:
    output = OutputConfig(trace_step=trace_step)
    return TrainingConfig(
        SCHEDULE, ModelConfig(f"{STAGES}:{stages}"), steps=2, check=check, output=output, evaluate=evaluate
    )


def checked(stages: str) -> CheckResult:
    found = train(config(stages, check=True)).check
    assert found is not None
    return found


@pytest.mark.parametrize("stages", ["dropout", "batch_norm", "unused", "frozen", "complex_numbers", "summing"])
def test_the_steps_are_equal(stages: str) -> None:
    found = checked(stages)
    assert found.max_gradient_error < 1e-5
    assert found.loss_error < 1e-6
    assert found.worst_parameter
    assert all(device.live_bytes == (0, 0) for device in found.devices)


def test_a_buffer_that_is_replaced_is_no_leak() -> None:
    found = checked("averaging")
    assert found.failures == ()
    assert [device.left_bytes for device in found.devices] == [0, 0]


def test_a_step_that_draws_other_numbers_is_another_step() -> None:
    """So the check above sees the random numbers."""
    model = Model(config("dropout"), compile_schedule(SCHEDULE), Launch(2))
    batch, modules = model.task.batch(0), model.task.build_stages()
    model.pipeline.run(*batch)
    reference_step(modules, model.task.loss, *batch)
    assert max(gradient_errors(model, modules))[0] > 0.01


def test_a_loss_of_zero() -> None:
    found = checked("solved")
    assert (found.max_gradient_error, found.loss_error) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        ("counting", r"the gradient of stages\[\d\]\.\w+ differs from the plain step's by .* at most 1.00e-05"),
        ("hoarding", r"device 1 has [\d.]+ \w+ left alive after a step, but must have none"),
    ],
)
def test_a_check_that_fails_is_said_before_anything_is_trained(stages: str, named: str) -> None:
    reports: list[StepReport] = []
    result = train(config(stages, check=True), reports.append)
    assert result.check is not None
    [failure] = result.check.failures
    assert re.match(named, failure)
    assert (result.losses, reports) == ((), [])


@pytest.mark.torchrun
def test_a_check_that_fails_ends_every_process_with_exit_code_1(run_ranks: RunRanks, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(schedule_text(SCHEDULE))
    options = ("--model", f"{STAGES}:counting", "--check", "--checkpoint", str(tmp_path / "kept"))
    first, second = run_ranks.each(MAIN, 2, "train", "--schedule", str(path), *options)
    assert (first.code, second.code) == (1, 1)
    assert "error: the check failed and nothing was trained: the gradient of stages[" in first.err
    assert "largest gradient error" in first.out
    assert "Traceback" not in first.err + second.err
    assert (second.out, second.err) == ("", "")
    assert not (tmp_path / "kept").exists()


def test_nothing_to_train_is_nothing_to_check() -> None:
    with pytest.raises(TrainingError, match=r"no parameter of the model requires a gradient, .* Maybe unfreeze some"):
        train(config("all_frozen", check=True))


def test_a_gradient_of_one_step_alone_is_an_error_unless_it_is_zero() -> None:
    model = Model(config("unused"), compile_schedule(SCHEDULE), Launch(2))
    modules = model.task.build_stages()
    parameters = dict(model.stages[0].module.named_parameters())
    parameters["weight"].grad = torch.ones_like(parameters["weight"])
    parameters["unused"].grad = torch.zeros_like(parameters["unused"])
    modules[1].get_parameter("bias").grad = torch.full((8,), torch.nan)
    assert gradient_errors(model, modules) == [
        (inf, "stages[0].weight"),
        (0.0, "stages[0].unused"),
        (inf, "stages[1].bias"),
    ]


def test_running_statistics_stay_as_they_were() -> None:
    """The evaluation at the end uses them."""
    plain = train(config("batch_norm", evaluate=1))
    looked_at = train(config("batch_norm", check=True, trace_step=1, evaluate=1))
    assert looked_at.trace is not None
    assert looked_at.losses == plain.losses
    assert looked_at.evaluation_loss == plain.evaluation_loss


def test_random_numbers_stay_as_they_were() -> None:
    assert train(config("dropout", check=True, trace_step=1)).losses == train(config("dropout")).losses


@pytest.mark.torchrun
def test_each_replica_draws_its_own_numbers(run_ranks: RunRanks, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(schedule_text(SCHEDULE))
    options = f"--model {STAGES}:dropout --steps 1 --check --data-parallel 2 --json"
    found = json.loads(run_ranks(MAIN, 4, "train", "--schedule", str(path), *options.split()))["check"]
    assert found["max_gradient_error"] < 1e-5
    assert found["loss_error"] < 1e-6


BF16 = ModelConfig("tiny", layers=8, dtype="bfloat16")
NORMED = ModelConfig(f"{STAGES}:normed")


def rounded_copies() -> Schedule:
    return random_executable(range(2), 4, 0, [{"name": "offload-bf16", "offload": OFFLOAD}])


def failures_of(model: ModelConfig, schedule: Schedule) -> Sequence[str]:
    check = train(TrainingConfig(schedule, model, steps=1, check=True)).check
    assert check is not None
    return check.failures


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        (BF16, one_f_one_b(2, 4)),  # an embedding sums many rows in bfloat16
        (ModelConfig("tiny", dtype="bfloat16"), one_f_one_b(2, 16)),  # many microbatches
        (NORMED, rounded_copies()),  # the gradient of a bias before a norm is 0 but for rounding
    ],
    ids=["sums in bfloat16", "many microbatches", "copies in bfloat16"],
)
def test_what_rounding_does_to_a_good_step_is_no_failure(model: ModelConfig, schedule: Schedule) -> None:
    assert not failures_of(model, schedule)


@pytest.mark.parametrize(
    ("model", "schedule"), [(BF16, one_f_one_b(2, 4)), (NORMED, rounded_copies())], ids=["bfloat16", "copies"]
)
def test_gradients_that_are_two_percent_too_large_are_more_than_rounding(
    model: ModelConfig, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(*arguments: Any, gradient_scale: float, **options: Any) -> Stage:
        return Stage(*arguments, gradient_scale=1.02 * gradient_scale, **options)

    monkeypatch.setattr("optpipe.train.model.Stage", scaled)
    [failure] = failures_of(model, schedule)
    assert re.match(r"the gradient of stages\[\d\]\.\S+ differs from the plain step's by \d\.\d+e-02 of", failure)
    limit = re.search(r"rounding explains at most (\S+)\. Maybe", failure)
    assert limit is not None
    assert float(limit[1]) < 0.01


def test_what_differs_from_call_to_call_is_no_rounding() -> None:
    """It would show in the measured effect of rounding, too."""
    [failure] = failures_of(ModelConfig(f"{STAGES}:drifting"), rounded_copies())
    assert "rounding explains at most 3.91e-03" in failure
