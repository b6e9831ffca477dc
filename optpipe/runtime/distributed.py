"""Transports between processes: NCCL and gloo, with one process group per pair of devices.

Sends and receives are issued by one thread, in list order, from the compute stream: NCCL's own streams wait for what
the compute stream was given before, and the compute stream for a receive where its message is used.

Written against torch 2.13 and not yet run on GPUs: none was at hand. On the CPU it runs over gloo, where it is tested.

NCCL runs the operations of one group one after the other, in the order in which they are issued, and ignores tags.
With a group for each direction of each pair, only what the program orders waits for one another.
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
from optpipe.runtime.transport import Receipt


def gather_json(value: Any, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> list[Any]:
    """The JSON values of all processes of `group` (None: of all), by rank, in every process.

    `device` holds the texts on their way: a GPU for a group of NCCL, by default the CPU. `all_gather_object` would
    pickle them, and whoever can write to a socket of this process could then run code in it.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(text)], device=device), group)
    longest = max(int(length) for length in lengths)
    texts = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in lengths]
    dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))), group)
    return [json.loads(bytes(text[: int(length)].tolist())) for text, length in zip(texts, lengths, strict=True)]


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


Pair = tuple[int, int]
"""Sender and receiver."""


def directed_pairs(program: Program) -> list[Pair]:
    """The pairs of devices between which the program sends, ascending: the same list on every rank."""
    return sorted(
        {
            (device, action.peer)
            for device, actions in enumerate(program.devices)
            for action in actions
            if action.kind in SENDS and action.peer is not None
        }
    )


def make_groups(pairs: Sequence[Pair], backend: str, device: torch.device) -> dict[Pair, dist.ProcessGroup]:
    """Called by all ranks of the default group with the same pairs; returns the groups that this rank is in.

    On a GPU the groups connect at once, so that the first messages do not pay for it.
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
class _Lane:
    """The group of one directed pair of devices, the other one's rank in it, and what has not left yet.

    The first `closed` of these are of a step that is over.
    """

    group: dist.ProcessGroup
    other: int
    leaving: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    closed: int = 0

    def drop_first(self) -> dist.Work:
        """The first to leave, whose message is held no longer."""
        self.closed = max(0, self.closed - 1)
        return self.leaving.popleft()[0]


class Nccl:
    """All ranks make it together, after `init_process_group`; `destroy_process_group` at exit ends its groups too.

    `replicas[r][d]` is the rank that runs device d of replica r; None: one pipeline, in which ranks are devices.

    A sent message is held until the host has seen that it has left: only then may its memory go back to the compute
    stream, which does not wait for NCCL's.
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
        [mine] = [ranks for ranks in replicas if rank in ranks]
        self._lanes: dict[Pair, _Lane] = {}
        for a, b in pairs:
            if group := groups.get((mine[a], mine[b])):
                other = mine[b] if mine[a] == rank else mine[a]
                self._lanes[a, b] = _Lane(group, dist.get_group_rank(group, other))

    def send(self, source: int, target: int, message: Tensor) -> None:
        """Send on the pair's own communicator, and keep the message until it has left."""
        lane = self._lanes[source, target]
        while lane.leaving and lane.leaving[0][0].is_completed():
            lane.drop_first()
        kept = message.contiguous()
        lane.leaving.append((lane.group.send([kept], lane.other, 0), kept))

    def post_receive(self, source: int, target: int, spec: MessageSpec, device: torch.device) -> Receipt:
        """Receive into a tensor of its own on `device`."""
        lane, room = self._lanes[source, target], spec.empty(device)
        return Incoming(lane.group.recv([room], lane.other, 0), room)

    def finish(self) -> None:
        """Have the current stream wait for every send."""
        self.close_step()
        self.finish_closed()

    def close_step(self) -> None:
        """Remember, for each pair, how many sends there are by now."""
        for lane in self._lanes.values():
            lane.closed = len(lane.leaving)

    def finish_closed(self) -> None:
        """Have the current stream wait for the sends that were there then."""
        for lane in self._lanes.values():
            while lane.closed:
                lane.drop_first().wait()

    def clear(self) -> None:
        """Messages whose partner never comes would block the streams for ever, so the groups are given up."""
        for lane in self._lanes.values():
            lane.group.abort()
        self._lanes.clear()
