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
    """The group of one directed pair of devices, the other one's rank in it, and what has not left yet."""

    group: dist.ProcessGroup
    other: int
    leaving: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)


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
        lane = self._lanes[source, target]
        while lane.leaving and lane.leaving[0][0].is_completed():
            lane.leaving.popleft()
        kept = message.contiguous()
        lane.leaving.append((lane.group.send([kept], lane.other, 0), kept))

    def post_receive(self, source: int, target: int, spec: MessageSpec, device: torch.device) -> Receipt:
        lane, room = self._lanes[source, target], spec.empty(device)
        return Incoming(lane.group.recv([room], lane.other, 0), room)

    def finish(self) -> None:
        for lane in self._lanes.values():
            while lane.leaving:
                lane.leaving.popleft()[0].wait()

    def clear(self) -> None:
        """Messages whose partner never comes would block the streams for ever, so the groups are given up."""
        for lane in self._lanes.values():
            lane.group.abort()
        self._lanes.clear()
