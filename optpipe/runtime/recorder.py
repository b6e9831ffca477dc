"""Recorders of one step: times and memory of each action, on the host and on CUDA.

The interpreter calls a `Recorder` around every action, where it is given one::

    recorder.begin(device, action)  # the action's turn has come
    ...                             # whatever it waits for: a message, the event of a copy
    recorder.waited()               # only where it may have waited: its time counts from here
    ...                             # its work
    recorder.end()

Actions do not nest: one thread issues them, one after the other. Time and memory are recorded in two steps of equal
work, because counting memory slows each operator many times over (`MemoryMeter`): `HostRecorder` (or `CudaRecorder`
on a GPU) in the one, `MemoryRecorder` in the other.

Written against torch 2.13 and not yet run: no GPU was at hand.

Every storage that an operator returns while the meter is open is counted on the current device from then until it is
freed, wherever it was meanwhile: nothing is inferred from what the runtime believes it holds. What existed before
(weights, gradients, the batch) is not counted, nor is scratch memory within one operator's kernel.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optpipe.compile.program import Action


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


class _Marks(NamedTuple):
    """An action with the events before its waits, after them (the same one where it has none), and at its end."""

    device: int
    action: Action
    begin: torch.cuda.Event
    start: torch.cuda.Event
    end: torch.cuda.Event


class CudaRecorder:
    """Times actions by events on the stream that does their work, without waiting for any while the step runs.

    Events of one GPU share a clock with a resolution of about half a microsecond. It is tied to the host's by one
    event between two readings of the host's clock, when the recorder is made: `clock_error_ns` is half of what lies
    between them. Several virtual devices on one GPU are recorded together.
    """

    def __init__(self) -> None:
        self._marks: list[_Marks] = []
        self._base = _timing_event()
        torch.cuda.synchronize()
        before_ns = perf_counter_ns()
        self._base.record()
        self._base.synchronize()
        after_ns = perf_counter_ns()
        self._base_ns = (before_ns + after_ns) // 2
        self.clock_error_ns = (after_ns - before_ns + 1) // 2

    def begin(self, device: int, action: Action, stream: torch.Stream | None = None, /) -> None:
        """Mark on the action's stream that its turn has come."""
        self._device, self._action = device, action
        self._stream: torch.Stream = torch.cuda.current_stream() if stream is None else stream
        self._begin = self._start = self._mark()

    def waited(self) -> None:
        """Mark that what it waited for is there."""
        self._start = self._mark()

    def end(self) -> None:
        """Mark that its work is done."""
        self._marks.append(_Marks(self._device, self._action, self._begin, self._start, self._mark()))

    def timings(self) -> Sequence[Timing]:
        """Every action so far, in the order in which they were issued; waits until the GPU is done with them."""
        torch.cuda.synchronize()
        return [
            Timing(m.device, m.action, self._time_ns(m.begin), self._time_ns(m.start), self._time_ns(m.end))
            for m in self._marks
        ]

    def _mark(self) -> torch.cuda.Event:
        event = _timing_event()
        event.record(self._stream)
        return event

    def _time_ns(self, event: torch.cuda.Event) -> int:
        milliseconds: float = self._base.elapsed_time(event)
        return self._base_ns + round(milliseconds * 1e6)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class CudaMemoryRecorder:
    """Reads the allocator around every action.

    Tensors are allocated and freed when the host says so, in the order in which it issues the actions; on the stream
    of the compute actions that is also the order in which their memory is used. Where several virtual devices share a
    GPU, each is charged with what changes during its own actions.
    """

    def __init__(self) -> None:
        self._uses: list[MemoryUse] = []
        self._held_bytes: dict[int, int] = defaultdict(int)

    def begin(self, device: int, action: Action, _stream: torch.Stream | None = None, /) -> None:
        """Have the allocator's peak begin anew."""
        self._device, self._action = device, action
        torch.cuda.reset_peak_memory_stats()
        self._before_bytes = torch.cuda.memory_allocated()

    def waited(self) -> None:
        """Waiting takes no memory."""

    def end(self) -> None:
        """Keep the allocator's peak during the action, and what it left."""
        held = self._held_bytes[self._device]
        peak = held + torch.cuda.max_memory_allocated() - self._before_bytes
        after = held + torch.cuda.memory_allocated() - self._before_bytes
        self._held_bytes[self._device] = after
        self._uses.append(MemoryUse(self._device, self._action, peak, after))

    def uses(self) -> Sequence[MemoryUse]:
        """Every action so far, in the order in which they were issued."""
        return self._uses


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Open it as a context around the work to measure, and say with `on` which device works."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes: dict[int, int] = defaultdict(int)
        self.peak_bytes: dict[int, int] = defaultdict(int)
        self._device: int | None = None
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @contextmanager
    def on(self, device: int | None) -> Iterator[None]:
        """Count what is allocated within on `device`; on None it is not counted."""
        outer, self._device = self._device, device
        try:
            yield
        finally:
            self._device = outer

    def restart_peak(self) -> None:
        """Let peaks count from now: each becomes what is alive."""
        self.peak_bytes = self.live_bytes.copy()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._device is not None:
            given = {storage._cdata for storage in _storages((args, kwargs))}
            for storage in _storages(result):
                if storage._cdata not in given and storage._cdata not in self._alive:
                    self._count(self._device, storage)
        return result

    def _count(self, device: int, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def freed(_: object) -> None:
            del self._alive[key]
            self.live_bytes[device] -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.live_bytes[device] += size
        self.peak_bytes[device] = max(self.peak_bytes[device], self.live_bytes[device])


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor):
            yield value.untyped_storage()
