"""Recorders of one step: times and memory of each action, on the host and on CUDA.

The executor calls a `Recorder`, if given, around every action::

    recorder.begin(device, action)  # the action is next
    ...                             # its waits: for a message, or the event of a copy
    recorder.waited()               # only if it may have waited: its time counts from here
    ...                             # its work
    recorder.end()

Actions do not nest: one thread issues them in sequence. Time and memory are recorded in two steps of equal work,
because counting memory slows each operator many times over (`MemoryMeter`): `HostRecorder` (or `CudaRecorder` on a GPU)
in the one, `MemoryRecorder` in the other.

Written against torch 2.13 and not yet run: no GPU was at hand.

Every storage that an operator returns while the meter is open is counted on the current device from then until it is
freed: nothing is inferred from the runtime's own records. Storages that existed before (weights, gradients, the batch)
are not counted, nor is scratch memory within one operator's kernel.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from optpipe.compile.program import Action
from optpipe.runtime.torch_private import TorchDispatchMode


class Recorder(Protocol):
    """Observer of every action of the devices of this process."""

    def begin(self, device: int, action: Action, stream: torch.Stream | None = None, /) -> None:
        """`action` is next on `device`. Its work goes to `stream`; None: the current stream."""
        ...

    def waited(self) -> None:
        """The waits of the action have ended (on a GPU: its stream has been made to wait)."""
        ...

    def end(self) -> None:
        """The work of the action has ended (on a GPU: all of it has been issued to its stream)."""
        ...


class Timing(NamedTuple):
    """Times of an action in nanoseconds of this process's clock (`time.perf_counter_ns`).

    `begin_ns`: it is next on its device; `start_ns`: its waits have ended; `end_ns`: its work has ended.
    """

    device: int
    action: Action
    begin_ns: int
    start_ns: int
    end_ns: int


class MemoryUse(NamedTuple):
    """Bytes alive on the device of an action: peak while it ran, and after it."""

    device: int
    action: Action
    peak_bytes: int
    after_bytes: int


class HostRecorder:
    """Timing by the host's clock, for devices on which work has ended when its call returns (CPU).

    Costs about a microsecond per action. `clock_error_ns` is 0.
    """

    clock_error_ns = 0

    def __init__(self) -> None:
        self._timings: list[Timing] = []

    def begin(self, device: int, action: Action, _stream: torch.Stream | None = None, /) -> None:
        """Note the begin of an action."""
        self._device, self._action = device, action
        self._begin_ns = self._start_ns = perf_counter_ns()

    def waited(self) -> None:
        """Note the end of its waits."""
        self._start_ns = perf_counter_ns()

    def end(self) -> None:
        """Note the end of its work."""
        end_ns = perf_counter_ns()
        self._timings.append(Timing(self._device, self._action, self._begin_ns, self._start_ns, end_ns))

    def timings(self) -> Sequence[Timing]:
        """Every action so far, in the order in which they ran."""
        return self._timings


class MemoryRecorder:
    """Memory of every action by an open meter, whose peaks it restarts."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self._uses: list[MemoryUse] = []

    def begin(self, device: int, action: Action, _stream: torch.Stream | None = None, /) -> None:
        """Restart the peak at the bytes alive now."""
        self._device, self._action = device, action
        self._meter.peak_bytes[device] = self._meter.live_bytes[device]

    def waited(self) -> None:
        """Waiting takes no memory."""

    def end(self) -> None:
        """Record the peak of the action and the bytes alive after it."""
        live, peak = self._meter.live_bytes[self._device], self._meter.peak_bytes[self._device]
        self._uses.append(MemoryUse(self._device, self._action, peak, live))

    def uses(self) -> Sequence[MemoryUse]:
        """Every action so far, in the order in which they ran."""
        return self._uses


class _Marks(NamedTuple):
    """An action with the events before its waits, after them (the same event without waits), and at its end."""

    device: int
    action: Action
    begin: torch.cuda.Event
    start: torch.cuda.Event
    end: torch.cuda.Event


class CudaRecorder:
    """Timing by CUDA events on the streams of the actions, without waiting while the step runs.

    Events of one GPU share a clock with a resolution of about half a microsecond. It is aligned with the host's clock
    by one event between two readings of that clock, when the recorder is made: `clock_error_ns` is half of the
    interval. Several virtual devices on one GPU are recorded together.
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
        """Record the begin of an action on its stream."""
        self._device, self._action = device, action
        self._stream: torch.Stream = torch.cuda.current_stream() if stream is None else stream
        self._begin = self._start = self._mark()

    def waited(self) -> None:
        """Record the end of its waits."""
        self._start = self._mark()

    def end(self) -> None:
        """Record the end of its work."""
        self._marks.append(_Marks(self._device, self._action, self._begin, self._start, self._mark()))

    def timings(self) -> Sequence[Timing]:
        """Every action so far, in issue order; blocks until the GPU has finished them."""
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
    """Memory of every action by the statistics of CUDA's allocator.

    Tensors are allocated and freed in the order in which the host issues actions, which is the order in which the
    compute stream uses their memory. If several virtual devices share a GPU, each is charged with the changes during
    its own actions.
    """

    def __init__(self) -> None:
        self._uses: list[MemoryUse] = []
        self._held_bytes: dict[int, int] = defaultdict(int)

    def begin(self, device: int, action: Action, _stream: torch.Stream | None = None, /) -> None:
        """Reset the allocator's peak."""
        self._device, self._action = device, action
        torch.cuda.reset_peak_memory_stats()
        self._before_bytes = torch.cuda.memory_allocated()

    def waited(self) -> None:
        """Waiting takes no memory."""

    def end(self) -> None:
        """Record the allocator's peak during the action and its level after it."""
        held = self._held_bytes[self._device]
        peak = held + torch.cuda.max_memory_allocated() - self._before_bytes
        after = held + torch.cuda.memory_allocated() - self._before_bytes
        self._held_bytes[self._device] = after
        self._uses.append(MemoryUse(self._device, self._action, peak, after))

    def uses(self) -> Sequence[MemoryUse]:
        """Every action so far, in the order in which they were issued."""
        return self._uses


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts live and peak bytes of storages by device; `on` sets the current device.

    What torch.compile has taken runs as its own code, whose operators can be counted; those of a graph cannot.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes: dict[int, int] = defaultdict(int)
        self.peak_bytes: dict[int, int] = defaultdict(int)
        self._device: int | None = None
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resized: list[torch.UntypedStorage] = []
        self._resized_bytes: list[int] = []
        self._uncompiled = ExitStack()

    def __enter__(self) -> Self:
        """Begin to count."""
        if "torch._dynamo" in sys.modules:
            # A function that is called under such a mode would stay uncompiled for good: torch.compile skips it.
            self._uncompiled.enter_context(torch.compiler.set_stance("force_eager"))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Count no longer."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._uncompiled.close()

    @contextmanager
    def on(self, device: int | None) -> Iterator[None]:
        """Count allocations within as those of `device`; None: do not count them."""
        outer, self._device = self._device, device
        try:
            yield
        finally:
            self._count_resized()
            self._device = outer

    def watch(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Also count storages that stay and are resized in place, as FSDP2 does with gathered parameters.

        Their present memory does not count, being there before.
        """
        self._resized = list(storages)
        self._resized_bytes = [storage.nbytes() for storage in self._resized]
        self._alive |= {storage._cdata: weakref.ref(storage) for storage in self._resized}

    def restart_peak(self) -> None:
        """Reset each peak to the bytes alive now."""
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
            self._count_resized()
            # Most ops return what is counted already, and what they were given is asked for where they do not.
            if any(storage._cdata not in self._alive for storage in _storages(result)):
                given = {storage._cdata for storage in _storages((args, kwargs))}
                for storage in _storages(result):
                    if storage._cdata not in given and storage._cdata not in self._alive:
                        self._count(self._device, storage)
        return result

    def _count_resized(self) -> None:
        """Count what watched storages have gained or lost for the current device."""
        device = self._device
        if device is None or not self._resized:
            return
        sizes = [storage.nbytes() for storage in self._resized]
        self.live_bytes[device] += sum(sizes) - sum(self._resized_bytes)
        self.peak_bytes[device] = max(self.peak_bytes[device], self.live_bytes[device])
        self._resized_bytes = sizes

    def _count(self, device: int, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def freed(_: object) -> None:
            del self._alive[key]
            self.live_bytes[device] -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.live_bytes[device] += size
        self.peak_bytes[device] = max(self.peak_bytes[device], self.live_bytes[device])


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """Storages of the tensors among arguments or results."""
    if isinstance(values, Tensor):
        yield values.untyped_storage()
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _storages(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _storages(value)
