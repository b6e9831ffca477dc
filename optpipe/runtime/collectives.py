"""Exchanges of all devices of a pipeline for a vocabulary layer: broadcast, gather and sum, in one process or many.

Each device issues the exchanges of a kind in the order of microbatches, and has the result by a receipt. As with
messages, tensors carry no names: the program is checked to have one order on all devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from optpipe.runtime.channel import TreeReceipt
from optpipe.runtime.messages import MessageSpec
from optpipe.runtime.torch_private import uses_of_memory
from optpipe.runtime.transport import Mailbox, Receipt

CPU = torch.device("cpu")


@dataclass
class _Exchanged:
    """Pending result of an exchange: what `make` makes of the tensors that come."""

    receipts: Sequence[Receipt]
    make: Callable[[list[Tensor]], Any]

    def ready(self) -> bool:
        """True if all have come."""
        return all(receipt.ready() for receipt in self.receipts)

    def wait(self) -> Any:
        """Wait for all, and return the result."""
        return self.make([receipt.wait() for receipt in self.receipts])


class Collectives(Protocol):
    """Exchanges of all devices; those of one kind are issued in one order."""

    def broadcast(self, device: int, source: int, tensor: Tensor | None, spec: MessageSpec) -> TreeReceipt:
        """The tensor of the device `source`, on every device; others give None, and the spec of what comes."""
        ...

    def all_gather(self, device: int, tensor: Tensor) -> TreeReceipt:
        """The tensors of all devices, a list in their order, on every device."""
        ...

    def reduce(self, device: int, target: int, tensor: Tensor) -> TreeReceipt | None:
        """The sum of all tensors, on the device `target`; None on others. Those may free their tensor."""
        ...

    def finish(self) -> None:
        """Wait until everything has left this process."""
        ...

    def clear(self) -> None:
        """Drop what is pending, after an error."""
        ...


class LocalCollectives:
    """Exchanges between devices of one process on the CPU: messages, with mailboxes of their own for each kind."""

    def __init__(self, devices: int) -> None:
        self._devices = range(devices)
        self._broadcasts, self._gathers = Mailbox(), Mailbox()
        self._addends: dict[int, deque[Tensor]] = {device: deque() for device in self._devices}

    def broadcast(self, device: int, source: int, tensor: Tensor | None, spec: MessageSpec) -> TreeReceipt:
        """Copy the tensor to each other device."""
        if tensor is None:
            return self._broadcasts.post_receive(source, device, spec, CPU)
        for other in self._others(device):
            self._broadcasts.send(device, other, tensor)
        return _Exchanged([], lambda _came: tensor)

    def all_gather(self, device: int, tensor: Tensor) -> TreeReceipt:
        """Copy each tensor to each other device."""
        for other in self._others(device):
            self._gathers.send(device, other, tensor)
        spec = MessageSpec.of(tensor)
        receipts = [self._gathers.post_receive(other, device, spec, CPU) for other in self._others(device)]
        return _Exchanged(receipts, lambda came: [*came[:device], tensor, *came[device:]])

    def reduce(self, device: int, target: int, tensor: Tensor) -> TreeReceipt | None:
        """Keep copies until the target adds them to its tensor, in the order of devices."""
        if device != target:
            self._addends[device].append(tensor.clone())
            return None
        others = [self._addends[other] for other in self._others(device)]
        return _Addition(tensor, others)

    def finish(self) -> None:
        """Check that every copy was taken."""
        for mailbox in (self._broadcasts, self._gathers):
            mailbox.finish()
        assert not any(self._addends.values()), "addends that nobody added"

    def clear(self) -> None:
        """Drop all copies."""
        for mailbox in (self._broadcasts, self._gathers):
            mailbox.clear()
        for copies in self._addends.values():
            copies.clear()

    def _others(self, device: int) -> list[int]:
        return [other for other in self._devices if other != device]


@dataclass
class _Addition:
    """Sum of a tensor and the first of each of the others' copies, asked for in the order in which they are made."""

    total: Tensor
    others: Sequence[deque[Tensor]]

    def ready(self) -> bool:
        """True if all others have given theirs."""
        return all(self.others)

    def wait(self) -> Tensor:
        """Add them up."""
        for copies in self.others:
            self.total += copies.popleft()
        return self.total


class GlooCollectives:
    """Exchanges between processes over gloo, one process group for each kind: no kind waits for another.

    All processes construct it together. In the default group the rank of a process is its device.
    """

    def __init__(self) -> None:
        self._broadcasts, self._gathers, self._sums = (
            dist.new_group(backend="gloo", group_desc=f"optpipe {kind}") for kind in ("broadcast", "gather", "sum")
        )
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()

    def broadcast(self, device: int, source: int, tensor: Tensor | None, spec: MessageSpec) -> TreeReceipt:
        """Broadcast a copy, into a tensor of its own on each other device."""
        room = spec.empty(CPU) if tensor is None else tensor.clone(memory_format=torch.contiguous_format)
        lent = _Lent(room)
        work = dist.broadcast(lent.alias(), group_src=source, group=self._broadcasts, async_op=True)
        if device == source:
            self._keep(work, room)
            return _Exchanged([], lambda _came: tensor)
        return _Pending(work, room, [lent])

    def all_gather(self, device: int, tensor: Tensor) -> TreeReceipt:  # noqa: ARG002
        """Gather into tensors of their own."""
        rooms = [torch.empty_like(tensor) for _ in range(self._gathers.size())]
        lent, own = [_Lent(room) for room in rooms], _Lent(tensor)
        work = dist.all_gather([one.alias() for one in lent], own.alias(), group=self._gathers, async_op=True)
        return _Pending(work, rooms, [*lent, own])

    def reduce(self, device: int, target: int, tensor: Tensor) -> TreeReceipt | None:
        """Add up in the target's tensor; others keep a copy until it has left."""
        own = tensor if device == target else tensor.clone()
        lent = _Lent(own)
        work = dist.reduce(lent.alias(), group_dst=target, group=self._sums, async_op=True)
        if device == target:
            return _Pending(work, own, [lent])
        self._keep(work, own)
        return None

    def finish(self) -> None:
        """Wait until every tensor has left."""
        while self._leaving:
            self._leaving.popleft()[0].wait()

    def clear(self) -> None:
        """Forget all tensors; the groups may still work on them."""
        self._leaving.clear()

    def _keep(self, work: dist.Work, tensor: Tensor) -> None:
        """Hold a tensor until it has left. What left before is dropped."""
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        self._leaving.append((work, tensor))


class _Lent:
    """A tensor whose memory is lent to gloo by an alias, so that uses of the memory tell when gloo has let go of it.

    The Python object of an alias ends a moment before its use of the memory, so a weak reference to it does not tell.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._uses = tensor, uses_of_memory(tensor)

    def alias(self) -> Tensor:
        """Another tensor of the same memory."""
        return self._tensor.detach()

    def is_back(self) -> bool:
        """True where the memory has no more uses than before it was lent."""
        return uses_of_memory(self._tensor) <= self._uses


LET_GO_S = 1.0
"""Longest wait until gloo's thread lets go of a tensor: it takes microseconds, milliseconds where cores are busy."""


class _Pending:
    """Pending result in memory that was lent to a work, complete when that has ended.

    A work has ended a moment before gloo's thread lets go of what it was given. Until then the memory would be neither
    the caller's nor free, and peaks would depend on that thread.
    """

    def __init__(self, work: dist.Work, result: Any, lent: Sequence[_Lent]) -> None:
        self._work: dist.Work | None = work
        self._result, self._lent = result, lent

    def ready(self) -> bool:
        """Always true: `wait` blocks."""
        return True

    def wait(self) -> Any:
        """Wait for the result, and until it is the caller's alone."""
        assert self._work is not None, "waited for once"
        self._work.wait()
        self._work, until = None, monotonic() + LET_GO_S
        while not all(one.is_back() for one in self._lent) and monotonic() < until:
            sleep(0)
        return self._result
