"""Recorders see every action once, in the order of the program, with times that fit and memory that is the meter's."""

from __future__ import annotations

from collections import Counter

import pytest

from optpipe.compile import compile_schedule
from optpipe.compile.actions import Action
from optpipe.runtime.memory_meter import MemoryMeter
from optpipe.runtime.trace import HostRecorder, MemoryRecorder
from optpipe.train.config import ModelConfig, TrainingConfig
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from optpipe.train.text import Batches, standard_library_text
from tests.optpipe.runtime.schedules import one_f_one_b


@pytest.fixture(scope="module")
def model() -> Model:
    schedule = one_f_one_b(2, 3, moved=[(0, 0), (0, 1)])
    return Model(
        TrainingConfig(schedule, ModelConfig("tiny")), compile_schedule(schedule), Launch(len(schedule.devices))
    )


@pytest.fixture(scope="module")
def batch() -> Batches:
    return Batches(standard_library_text(), microbatches=3, size=4, sequence=32, seed=0)


def test_each_device_is_timed_in_the_order_of_its_program(model: Model, batch: Batches) -> None:
    recorder = HostRecorder()
    model.pipeline.run(*batch.batch(0), recorder=recorder)
    timings = recorder.timings()
    for d, actions in enumerate(model.program.devices):
        assert [timing.action for timing in timings if timing.device == d] == list(actions)
    flat = [time_ns for timing in timings for time_ns in timing[2:]]
    assert flat == sorted(flat)  # one thread: no two actions at once


def test_only_what_waits_for_a_message_starts_after_its_turn(model: Model, batch: Batches) -> None:
    recorder = HostRecorder()
    model.pipeline.run(*batch.batch(0), recorder=recorder)
    late = {str(t.action.key) for t in recorder.timings() if t.start_ns > t.begin_ns}
    assert late == {f"F1.{i}" for i in range(3)} | {f"B0.{i}" for i in range(3)}


def test_memory_peaks_are_those_of_the_meter_and_nothing_is_left(model: Model, batch: Batches) -> None:
    meter = MemoryMeter()
    model.pipeline.run(*batch.batch(0), meter)
    watched = MemoryMeter()
    recorder = MemoryRecorder(watched)
    model.pipeline.run(*batch.batch(0), watched, recorder=recorder)
    uses = recorder.uses()
    for d, actions in enumerate(model.program.devices):
        mine = [use for use in uses if use.device == d]
        assert Counter(use.action for use in mine) == Counter(actions)
        assert max(use.peak_bytes for use in mine) == meter.peak_bytes[d]
        assert mine[-1].after_bytes == 0


def test_recording_changes_no_gradient(model: Model, batch: Batches) -> None:
    def gradients() -> list[bytes]:
        return [p.grad.numpy().tobytes() for s in model.stages.values() for p in s.module.parameters()]  # type: ignore[union-attr]

    model.pipeline.run(*batch.batch(0))
    plain = gradients()
    model.pipeline.run(*batch.batch(0), recorder=HostRecorder())
    assert gradients() == plain


def test_the_wait_of_an_action_is_apart_from_its_work() -> None:
    recorder = HostRecorder()
    recorder.begin(3, Action("F", 0, 0))
    recorder.end()
    recorder.begin(3, Action("B", 0, 0))
    recorder.waited()
    recorder.end()
    without, with_wait = recorder.timings()
    assert without.begin_ns == without.start_ns <= without.end_ns
    assert with_wait.begin_ns < with_wait.start_ns < with_wait.end_ns
