"""Callbacks between steps: when they act, that all is settled then, and that they see every step, to the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from instances.schedules import one_f_one_b, v_wave
from optpipe.compile import Program, compile_schedule
from optpipe.errors import RunFailedError, TrainingError
from optpipe.runtime.recorder import HostRecorder, Recorder
from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, OptimizerConfig, TrainingConfig, train
from optpipe.train.callback import Callback
from optpipe.train.launch import CPU, Launch
from optpipe.train.loop import _agree, _Run
from optpipe.train.model import Model
from optpipe.train.update import StepOutcome

STEPS = 8


class Noting(Callback):
    """Due before some steps, wishing after others, and remembering everything."""

    def __init__(self, model: Model, *, due: tuple[int, ...] = (), wishing: tuple[int, ...] = ()) -> None:
        self._model, self._due, self._wishing = model, due, wishing
        self.acted: list[int] = []
        self.known: list[int] = []
        self.watched: dict[int, Recorder] = {}

    def is_due(self, step: int) -> bool:
        return step in self._due

    def requests(self) -> bool:
        return self._model.step_number in self._wishing

    def on_step_boundary(self, step: int) -> None:
        assert self._model.settle() == [], "all is settled"
        assert self.known == list(range(step))
        self.acted.append(step)

    def recorder(self, step: int) -> Recorder | None:
        return self.watched.get(step)

    def done(self, outcome: StepOutcome) -> None:
        self.known.append(outcome.step)


def run(optimistic: bool, callbacks: Callable[[Model], list[Noting]]) -> list[Noting]:
    schedule = one_f_one_b(2, 3)
    sizes, optimizer = ModelConfig(name="tiny", sequence=8, microbatch_size=1), OptimizerConfig(clip_norm=2.0)
    config = TrainingConfig(schedule, model=sizes, optimizer=optimizer, steps=STEPS)
    model = Model(config, compile_schedule(schedule), Launch(2), optimistic=optimistic)
    found = callbacks(model)
    _Run(config, model, found).go()
    return found


@pytest.mark.parametrize("optimistic", [False, True])
def test_whoever_is_due_acts_before_that_step_and_after_the_last(optimistic: bool) -> None:
    [one, other] = run(optimistic, lambda model: [Noting(model, due=(0, 3, STEPS)), Noting(model, due=(3,))])
    assert one.acted == [0, 3, STEPS]
    assert other.acted == [3]
    assert one.known == other.known == list(range(STEPS))


def test_a_wish_acts_once_at_the_first_boundary_at_which_all_know_it() -> None:
    """It goes with the sums of step 2, which are there before step 3, or with post-validation before step 4."""
    [waits] = run(False, lambda model: [Noting(model, wishing=(2,))])
    [goes_on] = run(True, lambda model: [Noting(model, wishing=(2, 3))])
    assert waits.acted == [3]
    assert goes_on.acted == [4], "the second wish is known by then too"


def test_a_step_that_is_watched_is_recorded_whole_and_once() -> None:
    watch = HostRecorder()

    def watching(model: Model) -> list[Noting]:
        noting = Noting(model)
        noting.watched[4] = watch
        return [noting]

    run(True, watching)
    assert len(watch.timings()) == len(list(compile_schedule(one_f_one_b(2, 3)).actions()))


def test_a_swap_changes_no_number_and_refuses_another_placement() -> None:
    first, second = v_wave(2, 3), v_wave(2, 3, moved=[(0, 0), (1, 2)])
    config = TrainingConfig(first, model=ModelConfig(name="tiny", sequence=8, microbatch_size=1), steps=4)
    losses = []
    for swaps in (False, True):
        model = Model(config, compile_schedule(first), Launch(2), optimistic=True)
        outcomes = [o for step in range(2) for o in model.step(model.task.batch(step))] + model.settle()
        if swaps:
            model.swap(second)
            assert model.schedule is second
            assert model.program.offloaded
        outcomes += [o for step in (2, 3) for o in model.step(model.task.batch(step))] + model.settle()
        losses.append([outcome.loss for outcome in outcomes])
    assert losses[0] == losses[1]
    with pytest.raises(TrainingError, match=r"new schedule's placement is \(0, 1\) but the model runs with \(0, 1, 1"):
        model.swap(one_f_one_b(2, 3))


def test_a_layer_that_fails_in_a_step_ends_a_run_that_had_begun() -> None:
    config = TrainingConfig(one_f_one_b(2, 2), ModelConfig("tests.optpipe.train.odd_stages:breaking"), steps=3)
    reported: list[int] = []
    with pytest.raises(RunFailedError, match=r"device 1 failed at F1\.0, action .*ValueError: the layer broke"):
        train(config, lambda step: reported.append(step.step))
    assert reported == [0]


def test_a_layer_that_fails_where_it_is_measured_is_said_before_the_run() -> None:
    config = TrainingConfig(one_f_one_b(2, 2), ModelConfig("tests.optpipe.train.odd_stages:breaking_undeferred"))
    reported: list[int] = []
    with pytest.raises(TrainingError, match=r"device 1 failed at F1\.0, action .*: ValueError: the layer broke"):
        train(config, lambda step: reported.append(step.step))
    assert reported == []


class _OtherRelease:
    """Rank 1's release of OptPipe has no option that rank 0 has."""

    hardware = CPU

    def gather(self, options: dict[str, object]) -> list[dict[str, object]]:
        return [options, {name: value for name, value in options.items() if name != "evaluate"}]


def test_an_option_that_another_release_does_not_have_is_named() -> None:
    config = TrainingConfig(one_f_one_b(2, 2), ModelConfig("tiny"))
    with pytest.raises(TrainingError, match=r"evaluate is None on rank 1 but 0 on rank 0\. Maybe"):
        _agree(config, None, cast(Launch, _OtherRelease()))


def test_a_given_schedule_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def counting(schedule: Schedule, **options: bool) -> Program:
        compiled.append(schedule)
        return compile_schedule(schedule, **options)

    monkeypatch.setattr("optpipe.train.loop.compile_schedule", counting)
    train(TrainingConfig(one_f_one_b(2, 2), ModelConfig("tiny", sequence=8), steps=1))
    assert len(compiled) == 1
