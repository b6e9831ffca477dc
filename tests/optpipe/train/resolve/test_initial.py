"""Before the first step: what ends the measuring, and what is said of a search that brings nothing."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import count

import pytest

from optpipe.compile import compile_schedule
from optpipe.profile.ops import WARM_UP_ROUNDS
from optpipe.runtime.probe import measure_stage
from optpipe.train import ModelConfig, OnlineConfig, TrainingConfig, train
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from optpipe.train.resolve.initial import _ending_on_interrupt, initial_schedule
from optpipe.train.result import Events
from tests.optpipe.train.resolve.solvers import Scripted

ROUNDS = 3
ONLINE = OnlineConfig("first", devices=2, microbatches=4, rounds=ROUNDS)
CONFIG = TrainingConfig(None, ModelConfig("tiny", microbatch_size=1, sequence=8), online=ONLINE, steps=1, device="cpu")


@pytest.mark.parametrize("looks", [0, 2, WARM_UP_ROUNDS + ROUNDS])
def test_an_interrupt_ends_the_measuring_before_the_next_round_or_after_the_last(looks: int) -> None:
    asked = count()
    with pytest.raises(KeyboardInterrupt):
        initial_schedule(CONFIG, Launch(2), Scripted([]), Events(leads=False), lambda: next(asked) == looks)
    assert next(asked) == looks + 1


def test_one_of_many_processes_says_so_once_and_goes_on_until_all_can_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for rank in range(2):
            look = _ending_on_interrupt(lambda: True, Launch(2, rank=rank, distributed=True))
            look(0, ROUNDS)
            look(1, ROUNDS)
    assert caplog.messages == ["interrupted: ending when all ops are measured; Ctrl-C again ends at once"]


def test_what_is_trained_under_autocast_is_measured_under_autocast() -> None:
    """So budgets count what a device really holds."""
    config = replace(CONFIG, model=replace(CONFIG.model, autocast="bfloat16"))
    first = initial_schedule(config, Launch(2), Scripted([None]), Events(leads=False), lambda: False)
    model = Model(replace(config, schedule=first.schedule), compile_schedule(first.schedule), Launch(2))
    inputs, targets = model.task.batch(0)
    for s, stage in model.stages.items():
        sizes = measure_stage(stage, (inputs[0], targets[0]), *model.messages_at(s))
        assert first.measured.stages[s].sizes == sizes


def test_a_search_that_fails_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    result = train(CONFIG, None, Scripted(["fails"]))
    assert result.schedule is not None
    assert result.schedule.method == "ada-offload"
    told = "training begins with ada-offload: the search failed: nothing was found. Maybe allow more time."
    assert told in caplog.messages
