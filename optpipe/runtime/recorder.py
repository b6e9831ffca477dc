"""Recorders for a GPU: events on the streams for time, the caching allocator for memory.

Written against torch 2.13 and not yet run: no GPU was at hand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter_ns
from typing import NamedTuple

import torch

from optpipe.compile.actions import Action
from optpipe.runtime.trace import MemoryUse, Timing


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
