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

    A sent message is copied and kept until the step ends, or where the step does not wait for it, until the next one
    is validated: gloo cannot be asked whether a send has arrived.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        assert group is not None, "the process group is initialised"
        self._group, self._rank = group, group.rank()
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._closed = 0

    def send(self, source: int, target: int, message: Tensor) -> None:
        """Send a copy, so that the sender may go on with its tensor."""
        assert source == self._rank, "a process runs the device of its rank"
        kept = message.clone(memory_format=torch.contiguous_format)
        # dist.isend does the same, and more than doubles its cost by asking which group and rank are meant
        self._sends.append((self._group.send([kept], target, 0), kept))

    def post_receive(self, source: int, target: int, spec: MessageSpec, device: torch.device) -> Receipt:
        """Receive into a tensor of its own on `device`."""
        assert target == self._rank, "a process runs the device of its rank"
        room = spec.empty(device)
        return Incoming(self._group.recv([room], source, 0), room)

    def finish(self) -> None:
        """Wait until every send is done."""
        self.close_step()
        self.finish_closed()

    def close_step(self) -> None:
        """Remember how many sends there are by now."""
        self._closed = len(self._sends)

    def finish_closed(self) -> None:
        """Wait for the sends that were there then."""
        for _ in range(self._closed):
            self._sends.popleft()[0].wait()
        self._closed = 0

    def clear(self) -> None:
        """Forget all sends; the group itself may still work on them."""
        self._sends.clear()
        self._closed = 0


class Incoming:
    """A receive under way; waiting for it blocks the host (gloo) or the current stream (NCCL)."""

    def __init__(self, work: dist.Work, room: Tensor) -> None:
        self._work, self._room = work, room

    def ready(self) -> bool:
        """Always, for gloo cannot be asked: `wait` is where it shows."""
        return True

    def wait(self) -> Tensor:
        """The tensor, once it is full."""
        self._work.wait()
        return self._room
