"""How long work takes, measured many times: by the host's clock on the CPU, by events on a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns, thread_time_ns
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from optpipe.errors import InputError, Issue

T = TypeVar("T")

ClockName = Literal["wall", "cpu"]
"""`wall`: time as it passes. `cpu`: what the computing thread gets of it, which other programs do not lengthen."""


class Key(NamedTuple):
    """What is timed: an op's kind, or `transfer`, and the number of its stage or boundary."""

    kind: str
    number: int


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `count` measurements, in microseconds."""

    median_us: float
    lower_us: float
    upper_us: float
    count: int

    @property
    def relative(self) -> float:
        """From quartile to quartile, in medians: half of all measurements lie within it."""
        return (self.upper_us - self.lower_us) / self.median_us if self.median_us else 0.0


def spread_of(samples_us: Sequence[float]) -> Spread:
    """The spread of at least one measurement; quartiles between two of them are interpolated."""
    lower, middle, upper = np.quantile(np.asarray(samples_us, np.float64), [0.25, 0.5, 0.75]).tolist()
    return Spread(middle, lower, upper, len(samples_us))


class Stopwatch(Protocol):
    """Times pieces of work under keys."""

    def time(self, key: Key, work: Callable[[], T]) -> T:
        """Do the work; what it returns."""
        ...

    def restart(self) -> None:
        """Forget everything so far: it was warm-up."""
        ...

    def samples_us(self) -> Mapping[Key, Sequence[float]]:
        """Every time since the start, by key, in the order of the work."""
        ...


class HostStopwatch:
    """For work that is done when its call returns."""

    def __init__(self, clock: ClockName = "wall") -> None:
        self._clock_ns = perf_counter_ns if clock == "wall" else thread_time_ns
        self._samples_us: dict[Key, list[float]] = defaultdict(list)

    def time(self, key: Key, work: Callable[[], T]) -> T:
        """What `work` answers, with its time kept under `key`."""
        begin_ns = self._clock_ns()
        result = work()
        self._samples_us[key].append((self._clock_ns() - begin_ns) / 1000)
        return result

    def restart(self) -> None:
        """Forget all times so far."""
        self._samples_us.clear()

    def samples_us(self) -> Mapping[Key, Sequence[float]]:
        """All times, by key."""
        return self._samples_us


class CudaStopwatch:
    """For work on the current stream: an event before and one after, read when all is over.

    Written against torch 2.13 and not yet run: no GPU was at hand.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[Key, torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, key: Key, work: Callable[[], T]) -> T:
        """What `work` answers, between two events on the current stream."""
        begin, end = _timing_event(), _timing_event()
        begin.record()
        result = work()
        end.record()
        self._marks.append((key, begin, end))
        return result

    def restart(self) -> None:
        """Forget all events so far, when they are done."""
        torch.cuda.synchronize()
        self._marks.clear()

    def samples_us(self) -> Mapping[Key, Sequence[float]]:
        """All times by key, when the events are done."""
        torch.cuda.synchronize()
        samples: dict[Key, list[float]] = defaultdict(list)
        for key, begin, end in self._marks:
            samples[key].append(1000 * begin.elapsed_time(end))
        return samples


def stopwatch_for(device: torch.device, clock: ClockName = "wall") -> Stopwatch:
    """What times the work of a kind of device. Raises InputError where `cpu` would not count all of it."""
    if clock == "cpu" and (device.type == "cuda" or torch.get_num_threads() > 1):
        where = f"{torch.get_num_threads()} threads compute" if device.type == "cpu" else "a GPU computes"
        detail = f"is cpu, which counts one thread's time, but {where}. Maybe set OMP_NUM_THREADS=1, or use wall."
        raise InputError([Issue("--clock", "not_counted", detail)])
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch(clock)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
