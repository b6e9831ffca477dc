"""Which process groups carry messages: one for each directed pair of devices, made in one order by all ranks.

NCCL runs the operations of one group one after the other, in the order in which they are issued, and ignores tags.
With a group for each direction of each pair, only what the program orders waits for one another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from optpipe.compile.actions import SENDS, Program

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
