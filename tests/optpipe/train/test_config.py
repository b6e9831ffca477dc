"""Options that cannot be trained are refused with the field, the value and the limit."""

from __future__ import annotations

from typing import Any

import pytest

from instances.schedules import one_f_one_b
from optpipe.errors import InputError
from optpipe.train import ModelConfig, OptimizerConfig, OutputConfig, TrainingConfig
from optpipe.train.config import Group, OnlineConfig
from tests.sliced_schedules import seq1f1b_schedule

SCHEDULE = one_f_one_b(3, 2)


@pytest.mark.parametrize(
    ("group", "options", "message"),
    [
        (
            ModelConfig,
            {"name": "huge"},
            r"name is 'huge' but must be one of tiny, small, medium, hf:FOLDER, or package",
        ),
        (ModelConfig, {"dtype": "float8"}, r"dtype is 'float8' but must be one of float32, float64, bfloat16\."),
        (ModelConfig, {"autocast": "float16"}, r"autocast is 'float16' but must be one of bfloat16\."),
        (ModelConfig, {"autocast": "bfloat16", "dtype": "float64"}, r"dtype is 'float64' with autocast.*Maybe leave"),
        (ModelConfig, {"microbatch_size": 0}, r"microbatch_size is 0 but must be from 1 to 4096\."),
        (ModelConfig, {"microbatch_size": True}, r"microbatch_size is true but must be an integer\."),
        (ModelConfig, {"name": "tiny", "sequence": 33}, r"sequence is 33 but must be from 1 to 32\."),
        (ModelConfig, {"name": "mine:stages", "layers": 3}, r"layers is 3, but mine:stages decides that\. Maybe"),
        (ModelConfig, {"data": "mine:data"}, r"data is 'mine:data', but the GPT is trained on text\. Maybe"),
        (OptimizerConfig, {"learning_rate": 0.0}, r"learning_rate is 0.0 but must be above 0\."),
        (OptimizerConfig, {"learning_rate": float("nan")}, r"learning_rate is nan but must be finite\."),
        (OptimizerConfig, {"learning_rate": 10**400}, r"learning_rate is 10{56}\.\.\. but must be at most 1e\+30\."),
        (OptimizerConfig, {"lr": 0.1}, r"lr is not a setting\."),
        (ModelConfig, {"tied": 1}, r"tied is 1 but must be true or false\."),
        (OutputConfig, {"plot": "run.png"}, r"plot is 'run.png' but must be a path\."),
        (OptimizerConfig, {"beta1": 1.0}, r"beta1 is 1.0 but must be from 0 to 0.999999\."),
        (OptimizerConfig, {"name": "sgd", "beta2": 0.9}, r"beta2 is 0.9, but sgd has no second moment\. Maybe"),
        (TrainingConfig, {"device": "tpu"}, r"device is 'tpu' but must be one of auto, cpu, cuda\."),
        (TrainingConfig, {"timeout_seconds": 1e300}, r"timeout_seconds is 1e\+300 but must be at most 1000000\.0\."),
        (TrainingConfig, {"steps": 0}, r"steps is 0 but must be from 1 to 1000000000\."),
        (TrainingConfig, {"seed": -1}, r"seed is -1 but must be from 0 to 9223372036854775807\."),
        (
            TrainingConfig,
            {"schedule": SCHEDULE, "model": ModelConfig(layers=2)},
            r"model.layers is 2 but the schedule has 3 stages.*Maybe leave layers out",
        ),
        (
            TrainingConfig,
            {"schedule": seq1f1b_schedule(2, 2, 2), "online": OnlineConfig(mode="online")},
            r"^schedule cuts sequences into 2 slices, but --online measures and solves for whole ones\. Maybe leave",
        ),
    ],
)
def test_refused(group: type[Group], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        group(**options)


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(InputError) as caught:
        OptimizerConfig(beta1=2, clip_norm=-1.0)
    assert [issue.pointer for issue in caught.value.issues] == ["beta1", "clip_norm"]


def test_arguments_without_a_name_are_named() -> None:
    with pytest.raises(
        InputError, match=r"^schedule is \{\} but must be a Schedule\.\nmodel is 3 but must be a table\. Maybe"
    ):
        TrainingConfig({}, 3)


def test_layers_are_one_a_stage_unless_given() -> None:
    assert ModelConfig().shape(3).layers == 3
    assert ModelConfig(layers=7).shape(3).layers == 7
