"""What a traced step tells about itself: when each action ran, and what memory it took.

The interpreter calls a `Recorder` around every action, where it is given one::

    recorder.begin(device, action)  # the action's turn has come
    ...                             # whatever it waits for: a message, the event of a copy
    recorder.waited()               # only where it may have waited: its time counts from here
    ...                             # its work
    recorder.end()

Actions do not nest: one thread issues them, one after the other. Time and memory are recorded in two steps of equal
work, because counting memory slows each operator many times over (`MemoryMeter`): `HostRecorder` (or `CudaRecorder`
on a GPU) in the one, `MemoryRecorder` in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import NamedTuple, Protocol

import torch

from optpipe.compile.actions import Action
from optpipe.runtime.memory_meter import MemoryMeter


class Recorder(Protocol):
    """Told by the interpreter about every action of the devices of this process."""

    def begin(self, device: int, action: Action, stream: torch.Stream | None = None, /) -> None:
        """The turn of `action` has come on `device`. `stream` gets its work; None: the current stream."""
        ...

    def waited(self) -> None:
        """What the running action waits for is there (on a GPU: its stream has been told to wait for it)."""
        ...

    def end(self) -> None:
        """The work of the running action is done (on a GPU: all of it has been issued to its stream)."""
        ...


class Timing(NamedTuple):
    """When an action ran, in nanoseconds of this process's clock (`time.perf_counter_ns`).

    Its turn came at `begin_ns`, what it waits for was there at `start_ns`, its work was done at `end_ns`.
    """

    device: int
    action: Action
    begin_ns: int
    start_ns: int
    end_ns: int


class MemoryUse(NamedTuple):
    """Bytes alive on the device of an action: at most while it ran, and after it."""

    device: int
    action: Action
    peak_bytes: int
    after_bytes: int


class HostRecorder:
    """Times actions by the clock of the host: right where an action's work is done when its call returns (CPU).

    It costs about a microsecond an action. Times are as exact as the clock: `clock_error_ns` is 0.
    """

    clock_error_ns = 0

    def __init__(self) -> None:
        self._timings: list[Timing] = []

    def begin(self, device: int, action: Action, _stream: torch.Stream | None = None, /) -> None:
        """An action's turn has come."""
        self._device, self._action = device, action
        self._begin_ns = self._start_ns = perf_counter_ns()

    def waited(self) -> None:
        """What it waited for is there."""
        self._start_ns = perf_counter_ns()

    def end(self) -> None:
        """Its work is done: keep its times."""
        end_ns = perf_counter_ns()
        self._timings.append(Timing(self._device, self._action, self._begin_ns, self._start_ns, end_ns))

    def timings(self) -> Sequence[Timing]:
        """Every action so far, in the order in which they ran."""
        return self._timings


class MemoryRecorder:
    """Reads a meter, which must be open and counting, around every action. Restarts the meter's peaks as it goes."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self._uses: list[MemoryUse] = []

    def begin(self, device: int, action: Action, _stream: torch.Stream | None = None, /) -> None:
        """Measure the peak from what is alive now."""
        self._device, self._action = device, action
        self._meter.peak_bytes[device] = self._meter.live_bytes[device]

    def waited(self) -> None:
        """Waiting takes no memory."""

    def end(self) -> None:
        """Keep the peak of the action, and what it left alive."""
        live, peak = self._meter.live_bytes[self._device], self._meter.peak_bytes[self._device]
        self._uses.append(MemoryUse(self._device, self._action, peak, live))

    def uses(self) -> Sequence[MemoryUse]:
        """Every action so far, in the order in which they ran."""
        return self._uses
