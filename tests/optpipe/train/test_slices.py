"""Training on slices of sequences: gradients and losses of the unsliced step, and peaks as planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from optpipe.errors import TrainingError
from optpipe.runtime.slices import check_slices
from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, TrainingConfig, train
from tests.optpipe.train.cases import assert_plain_step
from tests.ranks import RunRanks
from tests.sample import some
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
    "three devices": seq1f1b_schedule(3, 3, 3),
}


CASES = [*((name, "float64") for name in SCHEDULES), ("seq1f1b", "float32")]


@pytest.mark.parametrize(("name", "dtype"), some(CASES))
def test_slices_equal_the_unsliced_step_in_the_planned_memory(name: str, dtype: Any) -> None:
    assert_plain_step(
        train(TrainingConfig(SCHEDULES[name], ModelConfig("tiny", layers=4, dtype=dtype), steps=1, check=True)).check,
        dtype,
    )


def config_of(name: str) -> TrainingConfig:
    """Two checked steps in several processes."""
    return TrainingConfig(SCHEDULES[name], ModelConfig("tiny", layers=4, dtype="float64"), steps=2, check=True)


@pytest.mark.torchrun
@pytest.mark.parametrize("name", some(("unequal slices", "split", "offload", "recomputed ahead")))
def test_two_ranks_do_what_one_process_does(run_ranks: RunRanks, name: str) -> None:
    found = run_ranks.train(__name__, 2, [name])[0][name]
    assert found["processes"] == 2
    assert_plain_step(found["check"])
    assert found["losses"] == list(train(replace(config_of(name), check=False)).losses)


@pytest.mark.torchrun
def test_three_ranks_equal_the_plain_step(run_ranks: RunRanks) -> None:
    found = run_ranks.train(__name__, 3, ["three devices"])[0]["three devices"]
    assert found["processes"] == 3
    assert_plain_step(found["check"])


def test_losses_are_those_of_whole_sequences_in_training_and_evaluation() -> None:
    sliced, whole = (
        train(TrainingConfig(schedule, ModelConfig("tiny", layers=2, dtype="float64"), steps=3, evaluate=2))
        for schedule in (seq1f1b_schedule(2, 3, 4), seq1f1b_schedule(2, 3, 1))
    )
    assert sliced.losses == pytest.approx(whole.losses, rel=1e-12)
    assert sliced.evaluation_loss == pytest.approx(whole.evaluation_loss, rel=1e-12)


def test_stages_that_do_not_take_slices_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"stages\[0\] runs 4 slices .* Linear does not take slices"):
        check_slices(0, nn.Linear(2, 2), 4)


def test_sequences_that_vary_are_refused() -> None:
    config = TrainingConfig(SCHEDULES["seq1f1b"], ModelConfig("tiny", layers=2, lengths="varying"), steps=1)
    with pytest.raises(TrainingError, match=r"slices of sequences, but model\.lengths is 'varying'"):
        train(config)


def test_sequences_shorter_than_their_slices_are_refused() -> None:
    with pytest.raises(TrainingError, match="length 3 cannot be cut into 4 slices"):
        train(TrainingConfig(SCHEDULES["seq1f1b"], ModelConfig("tiny", layers=2, sequence=3), steps=1))
