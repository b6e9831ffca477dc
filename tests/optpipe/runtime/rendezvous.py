"""A transport between threads, one a device, in which a send and its receive wait for one another, as in NCCL.

When every thread waits and none can go on, all of them are told so: a deadlock ends a test at once.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition

import torch
from torch import Tensor

from optpipe.runtime import MessageSpec
from optpipe.runtime.transport import Receipt

Pair = tuple[int, int]


class StuckError(Exception):
    """Every device that is not done waits for another."""


class Rendezvous:
    """Shared by the threads of all devices. A thread says with `leave` that its device is done or has failed."""

    def __init__(self, devices: int) -> None:
        self._turn = Condition()
        self._there = set(range(devices))
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._offered: dict[Pair, Tensor] = {}
        self._stuck = False

    def send(self, source: int, target: int, message: Tensor) -> None:
        with self._turn:
            self._offered[source, target] = message
            self._turn.notify_all()
            self._wait(source, lambda: (source, target) not in self._offered)

    def post_receive(self, source: int, target: int, spec: MessageSpec, device: torch.device) -> Receipt:
        room = spec.empty(device)
        with self._turn:
            self._wait(target, lambda: (source, target) in self._offered)
            room.copy_(self._offered.pop((source, target)))
            self._turn.notify_all()
        return _Arrived(room)

    def finish(self) -> None:
        """Whatever is sent has arrived."""

    def close_step(self) -> None:
        """So has it before the end of a step."""

    def finish_closed(self) -> None:
        """And before the next one is validated."""

    def clear(self) -> None:
        """Nothing is held."""

    def leave(self, device: int) -> None:
        with self._turn:
            self._there.discard(device)
            self._look()

    def _wait(self, device: int, may_go: Callable[[], bool]) -> None:
        self._waiting[device] = may_go
        self._look()
        self._turn.wait_for(lambda: may_go() or self._stuck)
        del self._waiting[device]
        if not may_go():
            raise StuckError

    def _look(self) -> None:
        """True if nobody can go on; once that is so it stays so."""
        everybody_waits = self._waiting.keys() >= self._there
        if everybody_waits and not any(may_go() for may_go in self._waiting.values()):
            self._stuck = True
        self._turn.notify_all()


class _Arrived:
    def __init__(self, message: Tensor) -> None:
        self._message = message

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self._message
