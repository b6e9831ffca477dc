"""Transports between processes: NCCL and gloo, with one process group per pair of devices.

One thread issues sends and receives in list order from the compute stream: NCCL's own streams wait for the work issued
on it before, and the compute stream waits for a receive when the message is used.

Written against torch 2.13 and not yet run on GPUs: none was at hand. On the CPU it runs over gloo, where it is tested.

NCCL runs the operations of one group in the order in which they are issued, and ignores tags. With one group per
direction of each pair, an operation waits only for those that the program orders before it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optpipe.compile.program import SENDS, Program
from optpipe.runtime.messages import MessageSpec
from optpipe.runtime.transport import Receipt, peer_errors


def gather_json(value: Any, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> list[Any]:
    """Gather a JSON value from each process of `group` (None: of all), by rank, in every process.

    Raises RunFailedError if one has ended or does not answer in time.

    `device` holds the transferred text: a GPU for a group of NCCL, by default the CPU. `all_gather_object` would pickle
    the values, so that anyone who can write to a socket of this process could run code in it.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    with peer_errors("what all processes tell one another"):
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(lengths, torch.tensor([len(text)], device=device), group)
        longest = max(int(length) for length in lengths)
        texts = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in lengths]
        dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))), group)
    return [json.loads(bytes(text[: int(length)].tolist())) for text, length in zip(texts, lengths, strict=True)]


class Gloo:
    """Sends and receives in `group` (None: the default one), in which the rank of a process is its device.

    A sent message is copied and kept until the step ends, or until the next one is validated if the step leaves its
    sends: gloo cannot tell whether a send has arrived.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        assert group is not None, "the process group is initialised"
        self._group, self._rank = group, group.rank()
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._closed = 0

    def send(self, source: int, target: int, message: Tensor) -> None:
        """Send a copy, so that the sender may reuse its tensor."""
        assert source == self._rank, "a process runs the device of its rank"
        kept = message.clone(memory_format=torch.contiguous_format)
        # dist.isend does the same, but resolving group and rank more than doubles the cost.
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
        """Close the step: mark the number of its sends."""
        self._closed = len(self._sends)

    def finish_closed(self) -> None:
        """Wait for the sends of closed steps."""
        for _ in range(self._closed):
            self._sends.popleft()[0].wait()
        self._closed = 0

    def clear(self) -> None:
        """Forget all sends; the group itself may still work on them."""
        self._sends.clear()
        self._closed = 0


class Incoming:
    """A pending receive; waiting for it blocks the host (gloo) or the current stream (NCCL)."""

    def __init__(self, work: dist.Work, room: Tensor) -> None:
        self._work, self._room = work, room

    def ready(self) -> bool:
        """Always true: gloo cannot tell, and `wait` blocks."""
        return True

    def wait(self) -> Tensor:
        """Wait for the tensor and return it."""
        self._work.wait()
        return self._room


Pair = tuple[int, int]
"""Sender and receiver."""


def directed_pairs(program: Program) -> list[Pair]:
    """Pairs of devices between which the program sends, ascending: the same list on every rank."""
    return sorted(
        {
            (device, action.peer)
            for device, actions in enumerate(program.devices)
            for action in actions
            if action.kind in SENDS and action.peer is not None
        }
    )


def make_groups(pairs: Sequence[Pair], backend: str, device: torch.device) -> dict[Pair, dist.ProcessGroup]:
    """Create the groups of all pairs and return those of this rank. Collective over the default group.

    On a GPU the groups connect at once, so that the first messages are not delayed.
    """
    rank = dist.get_rank()
    groups: dict[Pair, dist.ProcessGroup] = {}
    for pair in pairs:
        bound = device if rank in pair and device.type == "cuda" else None
        group = dist.new_group(list(pair), backend=backend, device_id=bound, group_desc=f"optpipe {pair[0]}->{pair[1]}")
        if rank in pair:
            groups[pair] = group
    return groups


@dataclass
class _PairGroup:
    """Group of a directed pair of devices, rank of the other device in it, and pending sends.

    The first `closed` sends belong to closed steps.
    """

    group: dist.ProcessGroup
    other: int
    leaving: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    closed: int = 0

    def drop_first(self) -> dist.Work:
        """Remove the first pending send and release its message."""
        self.closed = max(0, self.closed - 1)
        return self.leaving.popleft()[0]


class Nccl:
    """Transport by NCCL. Collective: all ranks construct it, after `init_process_group`.

    `destroy_process_group` at exit ends its groups too.

    `replicas[r][d]` is the rank that runs device d of replica r; None: one pipeline, in which ranks are devices.

    A message is held until the host has seen its send complete: only then may its memory be reused on the compute
    stream, which does not wait for NCCL's streams.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        backend: str = "nccl",
        replicas: Sequence[Sequence[int]] | None = None,
    ) -> None:
        replicas = replicas or [range(len(program.devices))]
        pairs = directed_pairs(program)
        groups = make_groups([(ranks[a], ranks[b]) for ranks in replicas for a, b in pairs], backend, device)
        rank = dist.get_rank()
        [own] = [ranks for ranks in replicas if rank in ranks]
        self._pair_groups: dict[Pair, _PairGroup] = {}
        for a, b in pairs:
            if group := groups.get((own[a], own[b])):
                other = own[b] if own[a] == rank else own[a]
                self._pair_groups[a, b] = _PairGroup(group, dist.get_group_rank(group, other))

    def send(self, source: int, target: int, message: Tensor) -> None:
        """Send on the pair's own communicator, and keep the message until the send is complete."""
        pair_group = self._pair_groups[source, target]
        while pair_group.leaving and pair_group.leaving[0][0].is_completed():
            pair_group.drop_first()
        kept = message.resolve_conj().resolve_neg().contiguous()
        pair_group.leaving.append((pair_group.group.send([kept], pair_group.other, 0), kept))

    def post_receive(self, source: int, target: int, spec: MessageSpec, device: torch.device) -> Receipt:
        """Receive into a tensor of its own on `device`."""
        pair_group, room = self._pair_groups[source, target], spec.empty(device)
        return Incoming(pair_group.group.recv([room], pair_group.other, 0), room)

    def finish(self) -> None:
        """Make the current stream wait for every send."""
        self.close_step()
        self.finish_closed()

    def close_step(self) -> None:
        """Close the step: mark the number of its sends for each pair."""
        for pair_group in self._pair_groups.values():
            pair_group.closed = len(pair_group.leaving)

    def finish_closed(self) -> None:
        """Make the current stream wait for the sends of closed steps."""
        for pair_group in self._pair_groups.values():
            while pair_group.closed:
                pair_group.drop_first().wait()

    def clear(self) -> None:
        """Abort the groups: messages without a partner would block the streams forever."""
        for pair_group in self._pair_groups.values():
            pair_group.group.abort()
        self._pair_groups.clear()
