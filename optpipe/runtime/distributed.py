"""The transport between GPUs: NCCL, one process a device.

Sends and receives are issued by one thread, in list order, from the compute stream: NCCL's own streams wait for what
the compute stream was given before, and the compute stream for a receive where its message is used.

Written against torch 2.13 and not yet run on GPUs: none was at hand. On the CPU it runs over gloo, where it is tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from optpipe.compile.actions import Program
from optpipe.runtime.gloo import Incoming
from optpipe.runtime.messages import MessageSpec
from optpipe.runtime.pair_groups import Pair, directed_pairs, make_groups
from optpipe.runtime.transport import Receipt


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
