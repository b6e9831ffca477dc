"""Streams of one device: one for compute, and one for copies in each direction.

A program gives the stream of each action and the actions of other streams that it waits for; `Streams` implements this
by events. Messages belong to the transport: they are issued from the compute stream, and awaited by their receipts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from optpipe.compile.program import Action
from optpipe.ops import Op

Work = Callable[[], None]


class Streams(Protocol):
    """Issue of actions on streams."""

    def arrival(self, action: Action, /) -> Work | None:
        """Call before an action's work: enters its stream, which waits for the events of `action.waits`."""
        ...

    def issuing(self, action: Action, work: Work, awaited: bool, /) -> Work:
        """Call for the work, after the arrival; records an event if another stream waits for the action."""
        ...

    def begin(self) -> None:
        """Begin a step: order it after all work that the caller has issued."""
        ...

    def end(self) -> None:
        """End a step: order later work of the caller after it, without blocking the host."""
        ...

    def synchronize(self) -> None:
        """Block the host until all issued work has ended."""
        ...

    def stream(self, action: Action, /) -> torch.Stream | None:
        """Stream of an action; None on a device without streams."""
        ...


class NoStreams:
    """CPU: work is done when its call returns, so list order is enough."""

    def arrival(self, _action: Action, /) -> None:
        """No call: list order satisfies every wait."""

    def issuing(self, _action: Action, work: Work, _awaited: bool, /) -> Work:
        """The work itself."""
        return work

    def begin(self) -> None:
        """Nothing to begin."""

    def end(self) -> None:
        """Nothing to end."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def stream(self, _action: Action, /) -> None:
        """None: there are no streams."""


class CudaStreams:
    """Three CUDA streams per device, so that several virtual devices on one GPU run concurrently.

    Written against torch 2.13 and not yet run: no GPU was at hand.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute, offload, reload = (_stream(device) for _ in range(3))
        self._streams = {"compute": self._compute, "communication": self._compute, "offload": offload, "reload": reload}
        self._events: dict[Op, torch.cuda.Event] = {}
        self._caller: torch.cuda.Stream | None = None

    def arrival(self, action: Action, /) -> Work:
        """Enter the action's stream, which waits for the events of `action.waits`."""
        stream = self._streams[action.stream]
        events = [self._event(op) for op in action.waits if not op.kind.startswith(("SEND", "RECV"))]
        if not events or action.stream == "communication":
            return lambda: torch.cuda.set_stream(stream)

        def arrive() -> None:
            torch.cuda.set_stream(stream)
            for event in events:
                stream.wait_event(event)

        return arrive

    def issuing(self, action: Action, work: Work, awaited: bool, /) -> Work:
        """The work, followed by an event on its stream if another stream waits for it."""
        if not awaited or action.stream == "communication":
            return work
        stream, event = self._streams[action.stream], self._event(action.key)

        def issue() -> None:
            work()
            event.record(stream)

        return issue

    def begin(self) -> None:
        """Make the compute stream wait for the caller's stream."""
        self._caller = torch.cuda.current_stream(self._device)
        self._compute.wait_stream(self._caller)

    def end(self) -> None:
        """Return to the caller's stream, which waits for all streams of the device."""
        assert self._caller is not None, "ended before it began"
        torch.cuda.set_stream(self._caller)
        for stream in set(self._streams.values()):
            self._caller.wait_stream(stream)

    def synchronize(self) -> None:
        """Block the host until all streams of the device are idle, and return to the caller's stream."""
        for stream in set(self._streams.values()):
            stream.synchronize()
        if self._caller is not None:
            torch.cuda.set_stream(self._caller)

    def stream(self, action: Action, /) -> torch.cuda.Stream:
        """The CUDA stream of the action's kind."""
        return self._streams[action.stream]

    def _event(self, op: Op) -> torch.cuda.Event:
        """Event of an action, recorded again in every step: no stream still waits for that of the last step."""
        if op not in self._events:
            self._events[op] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return self._events[op]


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def make_streams(device: torch.device) -> Streams:
    """Streams for the kind of device."""
    return CudaStreams(device) if device.type == "cuda" else NoStreams()
