"""The streams of one device: the compute stream, and one for copies each way.

A program says on which stream each action runs and which actions of other streams it waits for; streams of a device
turn that into events. Messages are the transport's matter: they are issued from the compute stream, and whoever waits
for one waits for its receipt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from optpipe.compile.program import Action
from optpipe.ops import Op

Work = Callable[[], None]


class Streams(Protocol):
    """Puts actions on streams."""

    def arrival(self, action: Action, /) -> Work | None:
        """What to call before an action's work: enters its stream, which waits for the events of `action.waits`."""
        ...

    def issuing(self, action: Action, work: Work, awaited: bool, /) -> Work:
        """The work, to be called after the arrival; an event follows it where another stream waits for it."""
        ...

    def begin(self) -> None:
        """Before the first action of a step: what the caller issued comes first."""
        ...

    def end(self) -> None:
        """After the last: what the caller issues comes later. The host does not wait."""
        ...

    def synchronize(self) -> None:
        """The host waits until all that was issued is done."""
        ...

    def stream(self, action: Action, /) -> torch.Stream | None:
        """Where an action runs; None where there are no streams."""
        ...


class NoStreams:
    """The CPU: work is done when its call returns, and list order is all the order there is."""

    def arrival(self, _action: Action, /) -> None:
        """Nothing: what an action needs is there when its turn comes."""

    def issuing(self, _action: Action, work: Work, _awaited: bool, /) -> Work:
        """The work as it is."""
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
    """Three CUDA streams of their own, so that several virtual devices on one GPU run side by side.

    Written against torch 2.13 and not yet run: no GPU was at hand.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute, offload, reload = (_stream(device) for _ in range(3))
        self._streams = {"compute": self._compute, "communication": self._compute, "offload": offload, "reload": reload}
        self._events: dict[Op, torch.cuda.Event] = {}
        self._caller: torch.cuda.Stream | None = None

    def arrival(self, action: Action, /) -> Work:
        """Go to the action's stream, and have it wait for the events of what the action waits for."""
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
        """The work, followed by an event on its stream where another stream awaits it."""
        if not awaited or action.stream == "communication":
            return work
        stream, event = self._streams[action.stream], self._event(action.key)

        def issue() -> None:
            work()
            event.record(stream)

        return issue

    def begin(self) -> None:
        """Have the compute stream wait for the caller's."""
        self._caller = torch.cuda.current_stream(self._device)
        self._compute.wait_stream(self._caller)

    def end(self) -> None:
        """Go back to the caller's stream, and have it wait for all of ours."""
        assert self._caller is not None, "ended before it began"
        torch.cuda.set_stream(self._caller)
        for stream in set(self._streams.values()):
            self._caller.wait_stream(stream)

    def synchronize(self) -> None:
        """Have the host wait for our streams, and go back to the caller's."""
        for stream in set(self._streams.values()):
            stream.synchronize()
        if self._caller is not None:
            torch.cuda.set_stream(self._caller)

    def stream(self, action: Action, /) -> torch.cuda.Stream:
        """The CUDA stream of the action's kind."""
        return self._streams[action.stream]

    def _event(self, op: Op) -> torch.cuda.Event:
        """The event of an action, recorded anew in every step: nobody still waits for the last step's."""
        if op not in self._events:
            self._events[op] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return self._events[op]


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def make_streams(device: torch.device) -> Streams:
    """The streams that a kind of device has."""
    return CudaStreams(device) if device.type == "cuda" else NoStreams()
