"""The bookkeeping of the recorders for a GPU, on events and an allocator that stand for one. No GPU runs here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from optpipe.compile.actions import Action
from optpipe.runtime.trace_cuda import CudaMemoryRecorder, CudaRecorder


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
