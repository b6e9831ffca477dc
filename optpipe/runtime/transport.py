"""How messages get from device to device: the interface, and the mailbox for devices that share a process.

Messages carry no names: between two devices they arrive in the order in which they are sent, which is all that NCCL
promises, and the program is checked to need no more. What a transport holds for itself is not counted by the memory
meter; a received message is, from the moment its receive is posted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Uncounted = Callable[[], AbstractContextManager[None]]
"""Opens a context in which allocations are not the device's."""


@dataclass(frozen=True)
class MessageSpec:
    """Shape and dtype of what crosses a boundary; activations and their gradients agree in both."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """A message with undefined contents."""
        return torch.empty(self.shape, dtype=self.dtype)

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Receipt(Protocol):
    """A message on its way."""

    def ready(self) -> bool:
        """Whether `wait` may be called now. Only devices that share a process ever need to say no."""
        ...

    def wait(self) -> Tensor:
        """The message."""
        ...


class Transport(Protocol):
    """Moves messages between devices, first in, first out for each directed pair of devices."""

    def send(self, source: int, target: int, message: Tensor) -> None:
        """Send without waiting for the receiver. The message may be freed when this returns."""
        ...

    def post_receive(self, source: int, target: int, spec: MessageSpec) -> Receipt:
        """Allocate room for the next message from `source` that no receive is posted for."""
        ...

    def finish(self) -> None:
        """Return when every send has arrived."""
        ...

    def clear(self) -> None:
        """Drop what is on its way: after an error."""
        ...


class Mailbox:
    """The transport within one process: a queue for each directed pair of devices."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self._posted: dict[tuple[int, int], deque[_Letter]] = defaultdict(deque)

    def send(self, source: int, target: int, message: Tensor) -> None:
        posted = self._posted[source, target]
        if posted:
            posted.popleft().deliver(message)
        else:
            self._sent[source, target].append(message.clone())

    def post_receive(self, source: int, target: int, spec: MessageSpec) -> Receipt:
        letter = _Letter(spec.empty())
        sent = self._sent[source, target]
        if sent:
            letter.deliver(sent.popleft())
        else:
            self._posted[source, target].append(letter)
        return letter

    def finish(self) -> None:
        left = {pair: len(sent) for pair, sent in self._sent.items() if sent}
        assert not left, f"messages that nobody received: {left}"

    def clear(self) -> None:
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
