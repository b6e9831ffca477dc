"""The transport between processes on the CPU: gloo, one process a device."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from optpipe.runtime.messages import MessageSpec
from optpipe.runtime.transport import Receipt


class Gloo:
    """Sends and receives in `group` (None: the default one), in which the rank of a process is its device.

    A sent message is copied and kept until the step ends: gloo cannot be asked whether a send has arrived.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        assert group is not None, "the process group is initialised"
        self._group, self._rank = group, group.rank()
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, source: int, target: int, message: Tensor) -> None:
        assert source == self._rank, "a process runs the device of its rank"
        kept = message.clone(memory_format=torch.contiguous_format)
        # dist.isend does the same, and more than doubles its cost by asking which group and rank are meant
        self._sends.append((self._group.send([kept], target, 0), kept))

    def post_receive(self, source: int, target: int, spec: MessageSpec, device: torch.device) -> Receipt:
        assert target == self._rank, "a process runs the device of its rank"
        room = spec.empty(device)
        return Incoming(self._group.recv([room], source, 0), room)

    def finish(self) -> None:
        while self._sends:
            self._sends.popleft()[0].wait()

    def clear(self) -> None:
        self._sends.clear()


class Incoming:
    """A receive under way; waiting for it blocks the host (gloo) or the current stream (NCCL)."""

    def __init__(self, work: dist.Work, room: Tensor) -> None:
        self._work, self._room = work, room

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor:
        self._work.wait()
        return self._room
