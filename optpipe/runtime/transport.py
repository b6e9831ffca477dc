"""Transport protocol, mailboxes, and the transport between devices of one process.

Tensors carry no names: between two devices they arrive in the order in which they are sent, which is all that NCCL
promises, and the program is checked to need no more. What a transport holds for itself is not counted by the memory
meter; a received tensor is, from the moment its receive is posted.

In one process each directed pair of devices has a stream of its own. A copy on it waits for the event of the sender's
compute stream behind which the message is made, and for that of the receiver's behind which the room for it is free;
the receiver's compute stream waits for the copy. So messages overlap compute, and their order is that of the program.

The sender's memory is given back to its own stream only when the host has seen that the copy is over; until then the
transport holds it.

Written against torch 2.13 and not yet run: no GPU was at hand.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from optpipe.errors import RunFailedError
from optpipe.runtime.messages import MessageSpec


class Receipt(Protocol):
    """A tensor on its way."""

    def ready(self) -> bool:
        """Whether `wait` may be called now. Only devices that share a process ever need to say no."""
        ...

    def wait(self) -> Tensor:
        """The tensor, for use on the current stream."""
        ...


class Transport(Protocol):
    """Moves tensors between devices, first in, first out for each directed pair of devices."""

    def send(self, source: int, target: int, message: Tensor) -> None:
        """Send without waiting for the receiver. The message may be freed when this returns."""
        ...

    def post_receive(self, source: int, target: int, spec: MessageSpec, device: torch.device) -> Receipt:
        """Allocate room on `device` for the next tensor from `source` that no receive is posted for."""
        ...

    def finish(self) -> None:
        """Return when every send has arrived; on streams, when the current stream will wait for it."""
        ...

    def close_step(self) -> None:
        """A step has sent all it has to, and does not wait for it: `finish_closed` or `finish` will."""
        ...

    def finish_closed(self) -> None:
        """As `finish`, for the sends before the last `close_step`."""
        ...

    def clear(self) -> None:
        """Drop what is on its way: after an error."""
        ...


class Mailbox:
    """The transport within one process on the CPU: a queue for each directed pair of devices."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self._posted: dict[tuple[int, int], deque[_Letter]] = defaultdict(deque)

    def send(self, source: int, target: int, message: Tensor) -> None:
        """Fill the room that waits for the message, or keep a copy of it."""
        posted = self._posted[source, target]
        if posted:
            posted.popleft().deliver(message)
        else:
            self._sent[source, target].append(message.clone())

    def post_receive(self, source: int, target: int, spec: MessageSpec, device: torch.device) -> Receipt:
        """Room for a message, full already if that was sent."""
        letter = _Letter(spec.empty(device))
        sent = self._sent[source, target]
        if sent:
            letter.deliver(sent.popleft())
        else:
            self._posted[source, target].append(letter)
        return letter

    def finish(self) -> None:
        """Check that all was received: a message that nobody received is an error."""
        left = {pair: len(sent) for pair, sent in self._sent.items() if sent}
        assert not left, f"messages that nobody received: {left}"

    def close_step(self) -> None:
        """The same as `finish`: a send has arrived when it returns."""
        self.finish()

    def finish_closed(self) -> None:
        """Nothing: `close_step` has done it."""

    def clear(self) -> None:
        """Drop messages and rooms."""
        self._sent.clear()
        self._posted.clear()


class _Letter:
    def __init__(self, room: Tensor) -> None:
        self._room = room
        self._arrived = False

    def deliver(self, message: Tensor) -> None:
        self._room.copy_(message)
        self._arrived = True

    def ready(self) -> bool:
        return self._arrived

    def wait(self) -> Tensor:
        assert self._arrived, "a device must not go on before its message has come"
        return self._room


class LocalStreams:
    """Sends and receives are issued from the compute streams of their devices, by one thread."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], _Pair] = defaultdict(_Pair)

    def send(self, source: int, target: int, message: Tensor) -> None:
        """Hand the message to its pair, with the event after which it is whole."""
        self._pairs[source, target].send(_Sent(message, _event_of_current_stream(message.device)))

    def post_receive(self, source: int, target: int, spec: MessageSpec, device: torch.device) -> Receipt:
        """Room for a message, filled as soon as both sides have come."""
        room = spec.empty(device)
        incoming = _Incoming(room, _event_of_current_stream(device))
        self._pairs[source, target].post(incoming)
        return incoming

    def finish(self) -> None:
        """Have the host wait for all copies; a message that nobody received is an error."""
        left = {pair: len(lane.sent) for pair, lane in self._pairs.items() if lane.sent}
        assert not left, f"messages that nobody received: {left}"
        for lane in self._pairs.values():
            lane.synchronize()

    def close_step(self) -> None:
        """The same as `finish`: nothing is left for later."""
        self.finish()

    def finish_closed(self) -> None:
        """Nothing: `close_step` has done it."""

    def clear(self) -> None:
        """Wait for the copies under way and drop the rest."""
        for lane in self._pairs.values():
            lane.synchronize()
        self._pairs.clear()


def local_transport(device: torch.device) -> Transport:
    """The transport between devices of this process whose stages are on `device`."""
    return LocalStreams() if device.type == "cuda" else Mailbox()


@dataclass
class _Sent:
    message: Tensor
    made: torch.cuda.Event


@dataclass
class _Incoming:
    """A receipt: `arrived` is there once the copy is issued."""

    room: Tensor
    free: torch.cuda.Event
    arrived: torch.cuda.Event | None = None

    def ready(self) -> bool:
        return self.arrived is not None

    def wait(self) -> Tensor:
        assert self.arrived is not None, "a device must not go on before its message has come"
        torch.cuda.current_stream(self.room.device).wait_event(self.arrived)
        return self.room


@dataclass
class _Pair:
    """What is sent but not posted for, posted for but not sent, and being copied."""

    sent: deque[_Sent] = field(default_factory=deque)
    posted: deque[_Incoming] = field(default_factory=deque)
    copying: deque[tuple[torch.cuda.Event, Tensor]] = field(default_factory=deque)
    stream: torch.cuda.Stream | None = None

    def send(self, sent: _Sent) -> None:
        self._drop_copied()
        if self.posted:
            self._copy(sent, self.posted.popleft())
        else:
            self.sent.append(sent)

    def post(self, incoming: _Incoming) -> None:
        self._drop_copied()
        if self.sent:
            self._copy(self.sent.popleft(), incoming)
        else:
            self.posted.append(incoming)

    def synchronize(self) -> None:
        """The host waits for all copies."""
        if self.stream is not None:
            self.stream.synchronize()
        self.copying.clear()

    def _copy(self, sent: _Sent, incoming: _Incoming) -> None:
        if self.stream is None:
            self.stream = torch.cuda.Stream(incoming.room.device)  # type: ignore[no-untyped-call]
        self.stream.wait_event(sent.made)
        self.stream.wait_event(incoming.free)
        with torch.cuda.stream(self.stream):
            incoming.room.copy_(sent.message, non_blocking=True)
        incoming.arrived = self.stream.record_event()
        self.copying.append((incoming.arrived, sent.message))

    def _drop_copied(self) -> None:
        while self.copying and self.copying[0][0].query():  # type: ignore[no-untyped-call]
            self.copying.popleft()


def _event_of_current_stream(device: torch.device) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


@contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Within, processes exchange `what`. Raises RunFailedError where one has ended or does not answer in time."""
    try:
        yield
    except RuntimeError as error:
        raise RunFailedError(
            f"{what} did not come: {error}. Maybe another process has ended: see what it printed."
        ) from error
