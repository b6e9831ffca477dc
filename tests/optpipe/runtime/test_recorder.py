"""Recorders see every action once, in the order of the program, with times that fit and memory that is the meter's."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from instances.schedules import one_f_one_b
from optpipe.compile import compile_schedule
from optpipe.compile.program import Action
from optpipe.runtime.recorder import CudaMemoryRecorder, CudaRecorder, HostRecorder, MemoryMeter, MemoryRecorder
from optpipe.train.config import ModelConfig, TrainingConfig
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from optpipe.train.tasks.gpt import Batches, standard_library_text


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


class Stream:
    """Work ends at `now_ms` on it."""

    def __init__(self) -> None:
        self.now_ms = 0.0


class Event:
    """Passed when the stream comes to it."""

    def __init__(self, main: Stream) -> None:
        self._main = main

    def record(self, stream: Stream | None = None) -> None:
        self.at_ms = (stream or self._main).now_ms

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The current stream of a GPU."""
    stream = Stream()

    def event(*, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(stream)

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return stream


def test_times_are_those_of_the_stream_that_does_the_work(main: Stream) -> None:
    recorder = CudaRecorder()
    copies = Stream()
    recorder.begin(0, Action("F", 0, 0))
    main.now_ms = 1.0  # the message is there
    recorder.waited()
    main.now_ms = 3.5
    recorder.end()
    recorder.begin(1, Action("O", 0, 0), copies)  # type: ignore[arg-type]
    copies.now_ms = 2.0
    recorder.end()
    forward, offload = recorder.timings()
    assert (forward.device, str(forward.action.key), offload.device, str(offload.action.key)) == (0, "F0.0", 1, "O0.0")
    assert (forward.start_ns - forward.begin_ns, forward.end_ns - forward.start_ns) == (1_000_000, 2_500_000)
    assert offload.begin_ns == offload.start_ns == forward.begin_ns
    assert offload.end_ns - offload.start_ns == 2_000_000
    assert recorder.clock_error_ns > 0


def test_each_device_is_charged_with_what_changes_during_its_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = SimpleNamespace(now=100, peak=100)  # 100 bytes of weights
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocator.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: allocator.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(allocator, "peak", allocator.now))
    recorder = CudaMemoryRecorder()

    def play(device: int, kind: str, peak: int, after: int) -> None:
        recorder.begin(device, Action(kind, device, 0))
        allocator.peak, allocator.now = allocator.now + peak, allocator.now + after
        recorder.end()

    play(0, "F", 30, 20)
    play(1, "F", 8, 5)
    play(0, "B", 4, -20)
    play(1, "B", 1, -5)
    held = [(use.device, use.peak_bytes, use.after_bytes) for use in recorder.uses()]
    assert held == [(0, 30, 20), (1, 8, 5), (0, 24, 0), (1, 6, 0)]


def test_bytes_count_from_allocation_to_the_end_of_the_last_view() -> None:
    meter = MemoryMeter()
    with meter, meter.on(0):
        x = torch.zeros(10)
        assert meter.live_bytes[0] == 40
        view = x[2:4]
        x.add_(1)
        del x
        assert meter.live_bytes[0] == 40
        del view
    assert (meter.live_bytes[0], meter.peak_bytes[0]) == (0, 40)


def test_what_was_there_before_is_not_counted_even_through_views() -> None:
    weight = torch.zeros(10, 2)
    meter = MemoryMeter()
    with meter, meter.on(0):
        views = [weight.t(), weight.detach(), weight[0]]
        assert meter.live_bytes[0] == 0
        product = weight @ weight.t()
        assert meter.live_bytes[0] == 400
    assert len(views) == 3
    del product


def test_each_device_has_its_own_count() -> None:
    meter = MemoryMeter()
    with meter:
        with meter.on(0):
            x = torch.zeros(10)
            with meter.on(1):
                y = x + 1
            with meter.on(None):
                z = x.clone()
        assert dict(meter.live_bytes) == {0: 40, 1: 40}
        del x  # freed while no device works, still its own device's
    assert (meter.live_bytes[0], meter.live_bytes[1]) == (0, 40)
    del y, z


def test_the_peak_within_an_expression_is_seen() -> None:
    meter = MemoryMeter()
    with meter, meter.on(0):
        x = torch.zeros(10)
        x = (x + 1) * 2
        assert (meter.live_bytes[0], meter.peak_bytes[0]) == (40, 120)
        meter.restart_peak()
        assert meter.peak_bytes[0] == 40


def test_a_graph_is_counted_until_its_backward() -> None:
    leaf = torch.zeros(10, requires_grad=True)
    leaf.grad = torch.zeros(10)
    meter = MemoryMeter()
    with meter, meter.on(0):
        loss = (leaf.exp() + 1).sum()
        assert meter.live_bytes[0] == 40 + 4, "exp's result, which its backward needs, and the sum"
        torch.autograd.backward(loss)
        assert meter.live_bytes[0] == 4
        del loss
    assert meter.live_bytes[0] == 0
