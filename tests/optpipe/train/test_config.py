"""Options that cannot be trained are refused with the field, the value and the limit."""

from __future__ import annotations

from typing import Any

import pytest

from optpipe.errors import TrainingError
from optpipe.train import TrainingConfig
from tests.optpipe.runtime.schedules import one_f_one_b

SCHEDULE = one_f_one_b(3, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "huge"}, r"model is 'huge' but must be one of tiny, small, medium\."),
        ({"dtype": "float8"}, r"dtype is 'float8' but must be one of float32, float64\."),
        ({"autocast": "float16"}, r"autocast is 'float16' but must be one of None, bfloat16\."),
        ({"autocast": "bfloat16", "dtype": "float64"}, r"dtype is 'float64' with autocast to bfloat16.*Maybe leave"),
        ({"device": "tpu"}, r"device is 'tpu' but must be one of auto, cpu, cuda\."),
        ({"steps": 0}, r"steps is 0 but must be from 1 to 1000000000\."),
        ({"seed": -1}, r"seed is -1 but must be from 0 to 9223372036854775807\."),
        ({"microbatch_size": 0}, r"microbatch_size is 0 but must be from 1 to 4096\."),
        ({"model": "tiny", "sequence": 33}, r"sequence is 33 but must be from 1 to 32\."),
        ({"learning_rate": 0.0}, r"learning_rate is 0.0 but must be positive and finite\."),
        ({"learning_rate": float("nan")}, r"learning_rate is nan but must be positive and finite\."),
        ({"layers": 2}, r"layers is 2 but the schedule has 3 stages.*Maybe leave layers out"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        TrainingConfig(SCHEDULE, **options)


def test_layers_are_one_a_stage_unless_given() -> None:
    assert TrainingConfig(SCHEDULE).shape.layers == 3
    assert TrainingConfig(SCHEDULE, layers=7).shape.layers == 7
