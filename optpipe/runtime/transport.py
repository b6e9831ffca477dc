"""How messages get from device to device: the interface, and the mailbox for devices that share a process and its CPU.

Tensors carry no names: between two devices they arrive in the order in which they are sent, which is all that NCCL
promises, and the program is checked to need no more. What a transport holds for itself is not counted by the memory
meter; a received tensor is, from the moment its receive is posted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Protocol

import torch
from torch import Tensor

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
