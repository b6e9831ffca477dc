"""The transport between processes: gloo, one process a device, rank = device."""

from __future__ import annotations

from collections import deque

import torch.distributed as dist
from torch import Tensor

from optpipe.runtime.transport import MessageSpec, Receipt


class Gloo:
    """Sends and receives on the default process group, which must be initialised.

    A sent message is copied and kept until the step ends: gloo cannot be asked whether a send has arrived.
    """

    def __init__(self) -> None:
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, source: int, target: int, message: Tensor) -> None:
        assert source == dist.get_rank(), "a process runs the device of its rank"
        kept = message.clone()
        self._sends.append((_work(dist.isend(kept, target)), kept))

    def post_receive(self, source: int, target: int, spec: MessageSpec) -> Receipt:
        assert target == dist.get_rank(), "a process runs the device of its rank"
        room = spec.empty()
        return _Incoming(_work(dist.irecv(room, source)), room)

    def finish(self) -> None:
        while self._sends:
            self._sends.popleft()[0].wait()

    def clear(self) -> None:
        self._sends.clear()


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the process group"
    return work


class _Incoming:
    def __init__(self, work: dist.Work, room: Tensor) -> None:
        self._work = work
        self._room = room

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor:
        self._work.wait()
        return self._room
