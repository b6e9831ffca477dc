"""Stages of a user's own train as the GPT does, on batches of their own; what does not fit is said before a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import own_stages
from instances.schedules import one_f_one_b
from optpipe.errors import InputError, TrainingError
from optpipe.train import ModelConfig, OnlineConfig, TrainingConfig, train
from optpipe.train.tasks import build_task
from tests.optpipe.train.resolve.solvers import Scripted

BUILD, BATCH = "examples.own_stages:build", "examples.own_stages:batch"
SCHEDULE = one_f_one_b(4, own_stages.MICROBATCHES)


def test_they_equal_the_plain_step_and_learn() -> None:
    result = train(TrainingConfig(SCHEDULE, ModelConfig(BUILD, data=BATCH), steps=12, check=True, evaluate=1))
    assert result.check is not None
    assert result.check.max_gradient_error < 1e-5
    assert result.losses[-1] < 0.5 * result.losses[0]
    assert result.evaluation_loss == pytest.approx(result.losses[-1], rel=0.5)


def test_weights_and_batches_depend_on_seed_and_step_alone() -> None:
    config = TrainingConfig(SCHEDULE, ModelConfig(BUILD, data=BATCH), seed=3)
    task = build_task(config, 4, own_stages.MICROBATCHES)
    before = torch.get_rng_state()
    first, again = (
        [p for module in modules for p in module.parameters()] for modules in (task.build_stages(), task.build_stages())
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) and a is not b for a, b in zip(first, again, strict=True))
    assert torch.equal(task.batch(5)[0][2], own_stages.batch(5)[0][2])
    assert not torch.equal(task.batch(5)[0][2], task.batch(6)[0][2])


def test_without_data_one_microbatch_is_repeated_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    task = build_task(TrainingConfig(SCHEDULE, ModelConfig(BUILD)), 4, 8)
    inputs, targets = task.batch(7)
    assert len(inputs) == len(targets) == 8
    assert all(torch.equal(x, inputs[0]) for x in inputs)
    assert "no --data: every step trains on the one microbatch that examples.own_stages:build returns" in caplog.text


def test_it_is_said_once_where_a_schedule_is_found_first(caplog: pytest.LogCaptureFixture) -> None:
    online = OnlineConfig("first", devices=4, microbatches=4, rounds=1)
    train(TrainingConfig(None, ModelConfig(BUILD), online=online, steps=1, device="cpu"), None, Scripted([None]))
    assert caplog.text.count("no --data") == 1


@pytest.mark.parametrize(
    ("name", "returns", "message"),
    [
        ("none", "None", "data_none:batch: returns NoneType, but must return (inputs, targets), two lists"),
        ("half", "([x], [y] * 8)", "returns 1 inputs for step 0, but a step has 8 microbatches."),
        ("tensor", "(x, [y] * 8)", "returns Tensor for inputs, but must return (inputs, targets), two lists"),
        ("shape", "([x] * 7 + [x[:1]], [y] * 8)", "returns float32[1, 16] as inputs[7] of step 0, but examples.own"),
        ("text", "(['x'] * 8, [y] * 8)", "returns str in inputs[0], but a tensor, or"),
        ("fails", "1 / 0", "raises ZeroDivisionError: division by zero at data_fails.py:4 when called with 0."),
    ],
)
def test_batches_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, returns: str, message: str
) -> None:
    code = f"import torch\nx, y = torch.zeros(64, 16), torch.zeros(64, 1)\ndef batch(step):\n    return {returns}\n"
    (tmp_path / f"data_{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = TrainingConfig(SCHEDULE, ModelConfig(BUILD, data=f"data_{name}:batch"))
    with pytest.raises(InputError) as caught:
        build_task(config, 4, 8)
    assert message in f"{caught.value.source.removeprefix('data ')}: {caught.value}"


def test_stages_that_do_not_fit_one_another() -> None:
    expected = r"a stage of .*:misfits fails on what it receives: RuntimeError: mat1 and mat2 .* 'optpipe profile' says"
    with pytest.raises(TrainingError, match=expected):
        train(TrainingConfig(one_f_one_b(3, 2), ModelConfig("tests.optpipe.train.odd_stages:misfits")))


def test_another_number_of_stages_than_the_schedule_has() -> None:
    expected = r"model.name is examples.own_stages:build, which returns 4 stage\(s\), but the schedule has 3\. Maybe"
    with pytest.raises(InputError, match=expected):
        train(TrainingConfig(one_f_one_b(3, 2), ModelConfig(BUILD)))
