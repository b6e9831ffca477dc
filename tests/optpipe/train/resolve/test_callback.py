"""Schedules that change while a model trains: never to a worse one, and without a trace in the numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from optpipe.errors import InputError, NoSolutionError, TrainingError
from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, OnlineConfig, OptimizerConfig, TrainingConfig, TrainingResult, train
from solver.portfolio import solve
from tests.optpipe.train.online.solvers import Scripted
from tests.problems import uniform

MODEL = ModelConfig("tiny", dtype="float64", microbatch_size=1, sequence=8)
STEPS = 14
ONLINE = OnlineConfig("online", rounds=1, first_step=1, record_steps=1, every_steps=1000, least_gain=0)


def _given(method: str) -> Schedule:
    return solve(uniform(2, 6), method)


def _config(schedule: Schedule | None, online: OnlineConfig = ONLINE) -> TrainingConfig:
    return TrainingConfig(schedule, MODEL, OptimizerConfig(clip_norm=1.0), online=online, steps=STEPS, device="cpu")


def _kinds(result: TrainingResult) -> list[str]:
    return [event.kind for event in result.events]


@pytest.fixture(scope="module")
def plain_losses() -> tuple[float, ...]:
    return train(replace(_config(_given("gpipe")), online=OnlineConfig())).losses


def test_a_better_schedule_is_taken_and_losses_stay_what_they_were(plain_losses: tuple[float, ...]) -> None:
    result = train(_config(_given("gpipe")), None, Scripted(["zb-h1"]))
    assert _kinds(result)[:4] == ["measured", "timed", "solving", "swapped"]
    assert result.schedule is not None
    assert result.schedule.method == "zb-h1"
    assert result.losses == pytest.approx(plain_losses, rel=1e-12)


def test_where_nobody_says_otherwise_the_budget_is_what_the_given_schedule_takes() -> None:
    given, solver = _given("1f1b"), Scripted([None])
    train(_config(given), None, solver)
    [problem] = solver.problems
    assert [device.memory_bytes for device in problem.devices] == [
        device.peak_bytes_any_timing for device in solve(problem, "1f1b").devices
    ]


def test_a_worse_schedule_is_not_taken(plain_losses: tuple[float, ...]) -> None:
    result = train(_config(_given("zb-h1"), replace(ONLINE, memory_bytes=10**9)), None, Scripted(["gpipe"]))
    assert _kinds(result) == ["measured", "timed", "solving", "kept"]
    assert result.schedule is not None
    assert result.schedule.method == "zb-h1"
    assert result.losses == pytest.approx(plain_losses, rel=1e-12)


@pytest.mark.parametrize("answer", [None, "fails"])
def test_training_goes_on_where_a_search_finds_nothing(answer: str | None) -> None:
    result = train(_config(_given("gpipe")), None, Scripted([answer]))
    assert _kinds(result)[-1] == "kept"
    assert "training goes on" in result.events[-1].text
    assert len(result.losses) == STEPS


def test_a_search_that_is_not_over_at_the_end_is_ended() -> None:
    solver = Scripted(["zb-h1"])
    endless = solver.begin

    def begin(*arguments: object) -> object:
        found = endless(*arguments)  # type: ignore[arg-type]
        found.polls = 10**6
        return found

    solver.begin = begin  # type: ignore[method-assign, assignment]
    train(_config(_given("gpipe")), None, solver)
    assert solver.searches[0].cancelled


def test_without_a_schedule_training_begins_with_one_in_milliseconds() -> None:
    online = replace(ONLINE, devices=2, placement="v", microbatches=4)
    result = train(_config(None, online), None, Scripted(["zb-v"]))
    assert _kinds(result)[:4] == ["measured", "found", "timed", "solving"]
    assert "ada-offload" in result.events[1].text
    assert result.schedule is not None
    assert [stage.device for stage in result.schedule.problem.stages] == [0, 1, 1, 0]
    assert result.schedule.problem.microbatches == 4


def test_solving_first_trains_with_what_was_found() -> None:
    online = replace(ONLINE, mode="first", devices=2, microbatches=4)
    result = train(_config(None, online), None, Scripted(["zb-h1"]))
    assert _kinds(result) == ["measured", "found"]
    assert result.schedule is not None
    assert result.schedule.method == "zb-h1"
    assert len(result.losses) == STEPS


def test_ops_that_take_longer_than_before_are_solved_for_anew() -> None:
    """Any change counts here, and no two timings are equal."""
    config = replace(_config(_given("gpipe"), replace(ONLINE, every_steps=4, drift=1e-9)), steps=30)
    solver = Scripted(["zb-h1"] * 8)
    train(config, None, solver)
    assert len(solver.problems) > 1


def test_ops_that_take_about_as_long_are_not() -> None:
    online = replace(ONLINE, every_steps=4, drift=1e9)
    solver = Scripted(["zb-h1"])
    result = train(_config(_given("gpipe"), online), None, solver)
    assert len(solver.problems) == 1
    assert any("too little to solve anew" in event.text for event in result.events)


def test_memory_that_weights_alone_exceed_is_refused() -> None:
    with pytest.raises(InputError, match="Adam"):
        train(_config(None, replace(ONLINE, devices=2, memory_bytes=1000)), None, Scripted([]))


def test_memory_that_is_too_small_for_activations_is_named_with_what_would_do() -> None:
    online = replace(ONLINE, mode="first", devices=2, microbatches=4)
    with pytest.raises(NoSolutionError, match=r"memory is 677,000 bytes a device.*Maybe [\d,]+ bytes") as refused:
        train(_config(None, replace(online, memory_bytes=677_000)), None, Scripted(["zb-h1"]))
    [needed] = re.findall(r"Maybe ([\d,]+) bytes", str(refused.value))
    online = replace(online, memory_bytes=int(needed.replace(",", "")))
    assert len(train(_config(None, online), None, Scripted([None])).losses) == STEPS


def test_messages_that_wait_for_their_ops_are_within_the_memory_given() -> None:
    """The largest memory with which the first answer must be thrown away: one byte less than it takes with messages."""
    online = replace(ONLINE, mode="first", devices=2, microbatches=4, memory_bytes=10**9)
    config = _config(None, online)
    free = train(replace(config, steps=1, check=True), None, Scripted([None], first="zb-h1"))
    assert free.check is not None
    problem_bytes = [10**9 - (device.memory_bytes or 0) for device in (free.schedule or _given("1f1b")).problem.devices]
    taken = [held + device.planned_peak_bytes for held, device in zip(problem_bytes, free.check.devices, strict=True)]
    memory = max(taken) - 1
    tight = train(
        replace(config, steps=1, check=True, online=replace(online, memory_bytes=memory)), None, Scripted([None] * 9)
    )
    assert tight.check is not None
    assert all(
        held + device.peak_bytes <= memory for held, device in zip(problem_bytes, tight.check.devices, strict=True)
    )


def test_a_schedule_cannot_be_sought_without_a_solver() -> None:
    with pytest.raises(TrainingError, match="no solver was given"):
        train(_config(None, replace(ONLINE, mode="first", devices=2)))
