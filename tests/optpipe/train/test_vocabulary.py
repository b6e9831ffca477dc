"""A vocabulary layer on all devices: gradients and losses of the undivided model, and peaks as planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from instances.schedules import one_f_one_b
from optpipe.errors import OptPipeError, TrainingError
from optpipe.problem import Problem
from optpipe.runtime.vocabulary import VocabularyShard
from optpipe.train import CheckpointConfig, ModelConfig, OptimizerConfig, OutputConfig, TrainingConfig, train
from solver.build import build_schedule
from solver.serial import serial_orders
from tests.optpipe.compile.vocabulary import vocabulary_schedule
from tests.optpipe.test_spread import vocabulary
from tests.optpipe.train.cases import assert_plain_step
from tests.ranks import RunRanks
from tests.sample import some

STAGES = "tests.optpipe.train.vocabulary_stages"


def config(name: str, *, p: int = 3, barriers: int = 1, **settings: Any) -> TrainingConfig:
    return TrainingConfig(vocabulary_schedule(p, 4, barriers), ModelConfig(f"{STAGES}:{name}"), check=True, **settings)


@pytest.mark.parametrize(
    ("p", "barriers", "dtype", "tied"),
    some([(2, 1, "float64", False), (4, 2, "float64", True), (3, 1, "float32", True), (2, 2, "float32", False)]),
)
def test_the_gpt_trains_as_undivided(p: int, barriers: int, dtype: Any, tied: bool) -> None:
    model = ModelConfig("tiny", layers=p, dtype=dtype, tied=tied)
    divided = train(TrainingConfig(vocabulary_schedule(p, 4, barriers), model, steps=3, check=True, evaluate=2))
    whole = train(TrainingConfig(one_f_one_b(p, 4), model, steps=3, evaluate=2))
    assert_plain_step(divided.check, dtype)
    for one, other in ((divided.losses, whole.losses), (divided.evaluation_loss, whole.evaluation_loss)):
        assert one == pytest.approx(other, rel=1e-12 if dtype == "float64" else 1e-5)
    assert divided.parameters == whole.parameters


@pytest.mark.parametrize("barriers", some([1, 2]))
def test_the_last_stage_on_the_first_device_with_b_and_w_apart(barriers: int, caplog: pytest.LogCaptureFixture) -> None:
    data = vocabulary(2, 3, barriers=barriers)
    data["stages"] = [data["stages"][0] | {"device": d} for d in (0, 1, 1, 0)]
    data["spread"][0]["after"], data["gates"][0]["stage"] = [{"op": "F", "stage": 3}], 3
    problem = Problem.from_data(data)
    orders = serial_orders(problem)
    assert orders is not None
    schedule = build_schedule(problem, orders, 0.0, "serial", 0.0)
    assert {op.key.kind for device in schedule.devices for op in device.compute} == {"F", "B", "W", "S", "T"}
    model = ModelConfig("tiny", layers=4, dtype="float64", tied=barriers == 2)
    assert_plain_step(train(TrainingConfig(schedule, model, steps=3, check=True)).check)
    assert "stays in B" not in caplog.text


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("name", some(["ignored", "one_shard", "tied", "tied_in_one_shard"]))
def test_own_stages_whose_vocabulary_does_not_divide(name: str, barriers: int) -> None:
    check = train(config(name, barriers=barriers, steps=1)).check
    assert check is not None
    assert not check.failures
    assert max(check.max_gradient_error, check.loss_error) <= 1e-14


def config_of(case: str) -> TrainingConfig:
    """Four steps, of which the gradients of some, but not of all, are clipped; or the first two, or all resumed."""
    name, p, part = case.split("; ")
    model = ModelConfig("tiny", layers=4, dtype="float64", tied=name == "tied")
    schedule = vocabulary_schedule(int(p), 4, 2 if name == "two barriers" else 1)
    optimizer = OptimizerConfig(learning_rate=3e-2, clip_norm=2.5)
    kept = CheckpointConfig(None if part == "whole" else Path(name))
    steps = 2 if part == "first" else 4
    return TrainingConfig(schedule, model, optimizer, kept, steps=steps, check=part == "whole", evaluate=2)


@pytest.mark.torchrun
@pytest.mark.parametrize("p", some([2, 3]))
def test_ranks_do_what_one_process_does(run_ranks: RunRanks, p: int) -> None:
    """With updates that do not wait, of which some are undone; and they resume bit for bit."""
    names, parts = ("two barriers", "tied"), ("whole", "first", "resumed")
    [found, *_] = run_ranks.train(__name__, p, [f"{name}; {p}; {part}" for name in names for part in parts])
    for name in names:
        whole, _, resumed = (found[f"{name}; {p}; {part}"] for part in parts)
        alone = train(replace(config_of(f"{name}; {p}; whole"), check=False))
        assert whole["processes"] == p
        assert {report["rolled_back"] for report in whole["reports"]} == {True, False}
        assert_plain_step(whole["check"])
        assert whole["losses"] == pytest.approx(alone.losses, rel=1e-12)
        assert whole["evaluation_loss"] == pytest.approx(alone.evaluation_loss, rel=1e-12)
        assert resumed["first_step"] == 2
        assert resumed["losses"] == whole["losses"][2:]
        assert resumed["evaluation_loss"] == whole["evaluation_loss"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_check_finds_rows_whose_gradient_is_wrong(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device's are wrong by a millionth."""
    own = VocabularyShard._weights

    def wrong(shard: VocabularyShard, part: Any) -> Any:
        return own(shard, part) * (1 + 1e-6 * (shard._first > 0))

    monkeypatch.setattr(VocabularyShard, "_weights", wrong)
    check = train(config("tied" if tied else "ignored", steps=1)).check
    assert check is not None
    [failure] = check.failures
    assert "differs from the plain step's by" in failure
    assert check.max_gradient_error == pytest.approx(1e-6, rel=0.9)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
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
        (ModelConfig(f"{STAGES}:tied_twice"), r"stages\[2\].1.logits of .* has its weight in 3 places, but outside"),
        (ModelConfig(f"{STAGES}:not_linear"), r"stages\[2\].1.logits of .* is Sequential, but must be nn.Linear"),
        (ModelConfig(f"{STAGES}:own_loss"), "the loss is mean_loss, but that of a vocabulary layer .* cross entropy"),
        (ModelConfig("tiny", autocast="bfloat16"), "model.autocast is bfloat16"),
    ],
)
def test_models_that_do_not_go_with_it_are_refused(model: ModelConfig, detail: str) -> None:
    with pytest.raises(OptPipeError, match=detail):
        train(TrainingConfig(vocabulary_schedule(3, 4, 1), model, steps=1))
