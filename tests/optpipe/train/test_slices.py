"""Training on slices of sequences: gradients and losses of the unsliced step, and peaks as planned."""

from __future__ import annotations

from typing import Any

import pytest

from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, TrainingConfig, train
from tests.optpipe.train.cases import MAX_ERROR
from tests.sliced_schedules import COPY, microbatch_by_microbatch, seq1f1b_schedule, sliced_problem

FULL = {"name": "full", "kept_bytes": 10, "recompute_us": 5, "segment_bytes": 90}
BLOCKS = {"name": "selective", "kept_bytes": 20, "recompute_us": 5, "segment_bytes": 80}
BOTH = {"name": "full+offload", "kept_bytes": 10, "recompute_us": 5, "offload": COPY | {"bytes": 10}}
V = (0, 1, 1, 0)

SCHEDULES: dict[str, Schedule] = {
    "seq1f1b": seq1f1b_schedule(2, 3, 4),
    "unequal slices": seq1f1b_schedule(2, 2, 3, {"bytes": [2, 1.5, 1]}),
    "V": microbatch_by_microbatch(sliced_problem(V, 2, 2)),
    "split": microbatch_by_microbatch(sliced_problem(V, 2, 4), ("B", "W")),
    "offload": microbatch_by_microbatch(sliced_problem((0, 1), 2, 4, offload=COPY), ("B", "W"), offload=True),
    "recomputed ahead": microbatch_by_microbatch(sliced_problem((0, 1), 2, 4, modes=[FULL]), ("C", "BW"), mode="full"),
    "recomputed inside": microbatch_by_microbatch(sliced_problem((0, 1), 2, 3, modes=[FULL]), ("CBW",), mode="full"),
    "recomputed and split": microbatch_by_microbatch(
        sliced_problem((0, 1), 2, 3, modes=[FULL]), ("CB", "W"), mode="full"
    ),
    "blocks ahead": microbatch_by_microbatch(
        sliced_problem((0, 1), 2, 3, modes=[BLOCKS]), ("C", "B", "W"), mode="selective"
    ),
    "blocks inside": microbatch_by_microbatch(sliced_problem((0, 1), 2, 3, modes=[BLOCKS]), ("CBW",), mode="selective"),
    "input leaves": microbatch_by_microbatch(
        sliced_problem((0, 1), 2, 3, modes=[BOTH]), ("C", "BW"), mode="full+offload", offload=True
    ),
}


def assert_right(config: TrainingConfig) -> None:
    """A checked run: gradients and loss of the plain, unsliced step, peaks as planned, and nothing left."""
    check = train(config).check
    assert check is not None
    assert check.failures == ()
    assert check.max_gradient_error <= MAX_ERROR[config.model.dtype]
    assert check.loss_error <= MAX_ERROR[config.model.dtype]
    for device in check.devices:
        assert device.live_bytes == (0, 0)
        assert device.peak_bytes == pytest.approx(device.planned_peak_bytes, rel=0.02)


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float64") for name in SCHEDULES), ("seq1f1b", "float32")])
def test_slices_equal_the_unsliced_step_in_the_planned_memory(name: str, dtype: Any) -> None:
    assert_right(TrainingConfig(SCHEDULES[name], ModelConfig("tiny", layers=4, dtype=dtype), steps=1, check=True))
