"""Transport protocol, mailboxes, and the transport between devices of one process.

Tensors carry no names: between two devices they arrive in the order in which they are sent, the only guarantee of NCCL,
and the program is checked to need no more. The memory meter does not count the transport's own buffers; it counts a
received tensor from the moment its receive is posted.

In one process each directed pair of devices has a stream of its own. A copy on it waits for an event on the sender's
compute stream, after which the message is complete, and for one on the receiver's, after which its memory is free; the
receiver's compute stream waits for the copy. So messages overlap compute, and their order is that of the program.

The transport holds the sender's memory until the host has seen the copy complete; only then is it free for the sender's
own stream.

Written against torch 2.13 and not yet run: no GPU was at hand.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from optpipe.errors import RunFailedError
from optpipe.runtime.messages import MessageSpec


class Receipt(Protocol):
    """Pending receive of a tensor."""

    def ready(self) -> bool:
        """True if `wait` may be called now. False only between devices that share a process."""
        ...

    def wait(self) -> Tensor:
        """The tensor, for use on the current stream."""
        ...


class Transport(Protocol):
    """Moves tensors between devices, first in, first out for each directed pair of devices."""

    def send(self, source: int, target: int, message: Tensor) -> None:
        """Send without waiting for the receiver. The caller may free the message afterwards."""
        ...

    def post_receive(self, source: int, target: int, spec: MessageSpec, device: torch.device) -> Receipt:
        """Allocate memory on `device` and post a receive for the next tensor from `source`."""
        ...

    def finish(self) -> None:
        """Wait until every send has arrived; with streams, make the current stream wait."""
        ...

    def close_step(self) -> None:
        """Mark the end of a step's sends, without waiting: `finish_closed` or `finish` will."""
        ...

    def finish_closed(self) -> None:
        """Wait as `finish` does, for the sends before the last `close_step`."""
        ...

    def clear(self) -> None:
        """Drop pending messages, after an error."""
        ...


class Mailbox:
    """The transport within one process on the CPU: a queue for each directed pair of devices."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self._posted: dict[tuple[int, int], deque[_Letter]] = defaultdict(deque)

    def send(self, source: int, target: int, message: Tensor) -> None:
        """Fill the posted receive, or keep a copy of the message."""
        posted = self._posted[source, target]
        if posted:
            posted.popleft().deliver(message)
        else:
            self._sent[source, target].append(message.clone())

    def post_receive(self, source: int, target: int, spec: MessageSpec, device: torch.device) -> Receipt:
        """Post a receive; it is filled at once if the message has been sent."""
        letter = _Letter(spec.empty(device))
        sent = self._sent[source, target]
        if sent:
            letter.deliver(sent.popleft())
        else:
            self._posted[source, target].append(letter)
        return letter

    def finish(self) -> None:
        """Check that every message has a receive."""
        left = {pair: len(sent) for pair, sent in self._sent.items() if sent}
        assert not left, f"messages that nobody received: {left}"

    def close_step(self) -> None:
        """Finish at once: a send has arrived when it returns."""
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
        """Queue the message with the event after which it is complete."""
        self._pairs[source, target].send(_Sent(message, _event_of_current_stream(message.device)))

    def post_receive(self, source: int, target: int, spec: MessageSpec, device: torch.device) -> Receipt:
        """Post a receive, filled by a copy once the message has been sent."""
        room = spec.empty(device)
        incoming = _Incoming(room, _event_of_current_stream(device))
        self._pairs[source, target].post(incoming)
        return incoming

    def finish(self) -> None:
        """Block the host until all copies have ended; a message without a receive is an error."""
        left = {pair: len(lane.sent) for pair, lane in self._pairs.items() if lane.sent}
        assert not left, f"messages that nobody received: {left}"
        for lane in self._pairs.values():
            lane.synchronize()

    def close_step(self) -> None:
        """Finish at once: nothing is left for later."""
        self.finish()

    def finish_closed(self) -> None:
        """Nothing: `close_step` has done it."""

    def clear(self) -> None:
        """Wait for running copies and drop all other messages."""
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
    """A receipt; `arrived` is set when the copy is issued."""

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
    """Sends without a receive, receives without a send, and running copies of a pair of devices."""

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


def is_peer_error(error: Exception) -> bool:
    """True for an error of a process group. Those of gloo are plain RuntimeErrors, which name its source files."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


@contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Context in which processes exchange `what`; raises RunFailedError if one has ended or does not answer in time."""
    try:
        yield
    except RuntimeError as error:
        raise RunFailedError(
            f"{what} did not come: {error}. Maybe another process has ended: see what it printed."
        ) from error
