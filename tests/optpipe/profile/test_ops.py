"""The allocator's way of measuring stages finds what the counter of storages finds, where both see the same memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from optpipe.errors import InputError
from optpipe.profile import ops
from optpipe.profile.ops import HostStopwatch, Key, measure_op_sizes, spread_of, stopwatch_for
from optpipe.profile.subject import build_chain
from optpipe.runtime import MemoryMeter
from optpipe.runtime.activations import HostSlab
from optpipe.runtime.stage import Stage
from tests.optpipe.profile.subjects import CPU, WIDTH, perceptron


def allocator_reads(meter: MemoryMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test the allocator's figures are the meter's, which counts no host memory."""
    copy_out = Stage.copy_out

    def uncounted(stage: Stage, microbatch: int, slab: HostSlab) -> None:
        with meter.on(None):
            copy_out(stage, microbatch, slab)

    monkeypatch.setattr(Stage, "copy_out", uncounted)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: meter.live_bytes[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: meter.peak_bytes[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: meter.restart_peak())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_both_ways_agree(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = build_chain(perceptron((WIDTH, 64, 32, WIDTH)), CPU, 4, range(3))
    counted = measure_op_sizes(chain, CPU)[stage].largest
    chain.stages[stage].zero_gradients()
    with MemoryMeter() as meter, meter.on(0):
        allocator_reads(meter, monkeypatch)
        assert ops._AllocatorProbe(chain, stage, CPU).sizes() == counted
        assert meter.live_bytes[0] == 0, "nothing is left alive"


KEY = Key("F", 3)


@pytest.mark.parametrize(
    ("samples_us", "expected"),
    [
        ([7.0], (7.0, 7.0, 7.0, 1)),
        ([5.0, 1.0, 2.0, 4.0, 3.0], (3.0, 2.0, 4.0, 5)),
        ([1.0, 2.0, 3.0, 1000.0], (2.5, 1.75, 252.25, 4)),
    ],
)
def test_spread(samples_us: list[float], expected: tuple[float, float, float, int]) -> None:
    found = spread_of(samples_us)
    assert (found.median_us, found.lower_us, found.upper_us, found.count) == expected
    assert found.relative == pytest.approx((expected[2] - expected[1]) / expected[0])


def test_nothing_has_no_relative_spread() -> None:
    assert spread_of([0.0, 0.0]).relative == 0.0


def test_a_stopwatch_gives_what_work_returns_and_its_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks_ns: Iterator[int] = iter([0, 1_500, 10_000, 12_000, 20_000, 27_000])
    monkeypatch.setattr(ops, "perf_counter_ns", lambda: next(ticks_ns))
    watch = HostStopwatch()
    assert watch.time(KEY, lambda: "result") == "result"
    assert watch.samples_us() == {KEY: [1.5]}
    watch.restart()
    watch.time(KEY, lambda: None)
    watch.time(Key("B", 3), lambda: None)
    assert watch.samples_us() == {KEY: [2.0], Key("B", 3): [7.0]}


def test_the_thread_s_clock_refuses_to_count_one_of_many_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(InputError, match=r"2 threads compute\. Maybe set OMP_NUM_THREADS=1"):
            stopwatch_for(torch.device("cpu"), "cpu")
    finally:
        torch.set_num_threads(before)


class FakeEvent:
    """Events recorded a millisecond apart."""

    now_ms = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.now_ms += 1
        self.at_ms = FakeEvent.now_ms

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at_ms - self.at_ms


def test_events_are_read_in_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    watch = stopwatch_for(torch.device("cuda"))
    watch.time(KEY, lambda: None)
    watch.restart()
    assert watch.time(KEY, lambda: "result") == "result"
    assert watch.samples_us() == {KEY: [1000.0]}
