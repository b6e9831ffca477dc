"""A vocabulary layer on all devices: gradients and losses of the undivided model, and peaks as planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from instances.schedules import one_f_one_b
from optpipe.errors import OptPipeError, TrainingError
from optpipe.problem import Problem
from optpipe.train import CheckpointConfig, ModelConfig, OutputConfig, TrainingConfig, train
from solver.build import build_schedule
from solver.serial import serial_orders
from tests.optpipe.compile.vocabulary import vocabulary_schedule
from tests.optpipe.test_spread import vocabulary
from tests.optpipe.train.cases import assert_plain_step
from tests.optpipe.train.sliced_worker import config_of
from tests.optpipe.train.test_slices_torchrun import run
from tests.ranks import RunRanks

STAGES = "tests.optpipe.train.vocabulary_stages"


def config(name: str, *, p: int = 3, barriers: int = 1, **settings: Any) -> TrainingConfig:
    return TrainingConfig(vocabulary_schedule(p, 4, barriers), ModelConfig(f"{STAGES}:{name}"), check=True, **settings)


@pytest.mark.parametrize(("p", "barriers", "dtype"), [(2, 1, "float64"), (4, 2, "float64"), (3, 1, "float32")])
def test_the_gpt_trains_as_undivided(p: int, barriers: int, dtype: Any) -> None:
    model = ModelConfig("tiny", layers=p, dtype=dtype)
    divided = train(TrainingConfig(vocabulary_schedule(p, 4, barriers), model, steps=3, check=True))
    assert_plain_step(divided.check, dtype)
    whole = train(TrainingConfig(one_f_one_b(p, 4), model, steps=3))
    assert divided.losses == pytest.approx(whole.losses, rel=1e-12 if dtype == "float64" else 1e-5)
    assert divided.parameters == whole.parameters


@pytest.mark.parametrize("barriers", [1, 2])
def test_the_last_stage_on_the_first_device_with_b_and_w_apart(barriers: int, caplog: pytest.LogCaptureFixture) -> None:
    data = vocabulary(2, 3, barriers=barriers)
    data["stages"] = [data["stages"][0] | {"device": d} for d in (0, 1, 1, 0)]
    data["spread"][0]["after"], data["gates"][0]["stage"] = [{"op": "F", "stage": 3}], 3
    problem = Problem.from_data(data)
    orders = serial_orders(problem)
    assert orders is not None
    schedule = build_schedule(problem, orders, 0.0, "serial", 0.0)
    assert {op.key.kind for device in schedule.devices for op in device.compute} == {"F", "B", "W", "S", "T"}
    assert_plain_step(train(config_of(schedule)).check)
    assert "stays in B" not in caplog.text


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("name", ["ignored", "one_shard"])
def test_own_stages_whose_vocabulary_does_not_divide(name: str, barriers: int) -> None:
    check = train(config(name, barriers=barriers, steps=1)).check
    assert check is not None
    assert not check.failures
    assert max(check.max_gradient_error, check.loss_error) <= 1e-12


@pytest.mark.torchrun
@pytest.mark.parametrize("p", [2, 4])
def test_ranks_do_what_one_process_does(run_ranks: RunRanks, tmp_path: Path, p: int) -> None:
    schedules = {f"{barriers} barriers": vocabulary_schedule(p, 4, barriers) for barriers in (1, 2)}
    for name, found in run(run_ranks, tmp_path, schedules, p).items():
        assert found["processes"] == p
        assert_plain_step(found["check"])
        assert found["losses"] == pytest.approx(train(config_of(schedules[name])).losses, rel=1e-12)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "evaluate": ({"evaluate": 1}, r"evaluate is 1, but the schedule has the passes .* Maybe evaluate with"),
    "checkpoints": ({"checkpoints": CheckpointConfig(Path("never"))}, r"checkpoints.folder is never"),
    "trace": ({"output": OutputConfig(trace=Path("never"))}, r"output.trace is never"),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_settings_that_do_not_go_with_it_are_refused(setting: str) -> None:
    settings, detail = REFUSED[setting]
    with pytest.raises(TrainingError, match=detail):
        train(config("ignored", steps=1, **settings))


@pytest.mark.parametrize(
    ("model", "detail"),
    [
        (ModelConfig(f"{STAGES}:biased"), r"stages\[2\].1.logits of .* has a bias"),
        (ModelConfig(f"{STAGES}:no_layer"), "0 modules in the last stage of .* have vocabulary_layer"),
        (ModelConfig(f"{STAGES}:tied"), r"shares its weight with stages\[0\]"),
        (ModelConfig(f"{STAGES}:own_loss"), "the loss is mean_loss, but that of a vocabulary layer .* cross entropy"),
        (ModelConfig("tiny", tied=True), "model.tied is True"),
        (ModelConfig("tiny", autocast="bfloat16"), "model.autocast is bfloat16"),
    ],
)
def test_models_that_do_not_go_with_it_are_refused(model: ModelConfig, detail: str) -> None:
    with pytest.raises(OptPipeError, match=detail):
        train(TrainingConfig(vocabulary_schedule(3, 4, 1), model, steps=1))
