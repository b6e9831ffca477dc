"""Whether copies to and from the host disturb one another: both directions of a GPU, and GPUs beside each other.

On the CPU there is nothing to find out: the thread that computes copies too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optpipe.problem import CopyChannels

SLOWDOWN_LIMIT = 1.5
"""Two copies at once that take longer than so many alone share a channel: independent ones take 1, sharing ones 2."""

COPY_BYTES = 256 * 2**20
REPEATS = 5


@dataclass(frozen=True)
class Contention:
    """The channels, and a sentence on how they were found out."""

    channels: CopyChannels
    how: str


def measure_contention(device: torch.device, devices: int) -> Contention:
    """Of the GPUs that this process sees, which stand for all hosts; where it sees none, the defaults and why."""
    if device.type != "cuda":
        return Contention(CopyChannels(), "copy channels not measured: on the CPU the computing thread copies")
    copies = [_Copies(torch.device("cuda", d)) for d in range(torch.cuda.device_count())]
    duplex = not shares(_seconds([copies[0].out]), _seconds([copies[0].out, copies[0].back]))
    alone = _seconds([copies[0].out])
    pairs = [
        (a, b)
        for a, b in combinations(range(len(copies)), 2)
        if shares(alone, _seconds([copies[a].out, copies[b].out]))
    ]
    groups = on_all_hosts(groups_of(pairs), len(copies), devices)
    channels = CopyChannels(duplex=duplex, shared_by=groups)
    return Contention(channels, f"copy channels measured on {len(copies)} GPU(s): both directions, and every pair")


def contention_of_all(device: torch.device, devices: int, gather: Callable[[Any], list[Any]]) -> Contention:
    """The same, measured by rank 0 while the other processes wait; called by all of them together."""
    leads = not dist.is_initialized() or dist.get_rank() == 0
    mine = measure_contention(device, devices) if leads else None
    found = next(data for data in gather(mine and {"channels": mine.channels.to_data(), "how": mine.how}) if data)
    return Contention(CopyChannels.from_data(found["channels"]), found["how"])


def shares(alone: float, together: float) -> bool:
    """Whether two copies that take `alone` each, and `together` at once, share a channel."""
    return together > SLOWDOWN_LIMIT * alone


def groups_of(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Devices that share, directly or by way of others, each in one group, in ascending order."""
    groups: list[set[int]] = []
    for pair in pairs:
        touched = [group for group in groups if not group.isdisjoint(pair)]
        groups = [group for group in groups if group not in touched] + [set(pair).union(*touched)]
    return sorted(sorted(group) for group in groups)


def on_all_hosts(groups: Sequence[Sequence[int]], gpus: int, devices: int) -> list[list[int]]:
    """The groups of a host with so many GPUs, on as many equal hosts as the devices fill, first host first."""
    hosts = range(0, devices, gpus)
    found = [[host + gpu for gpu in group if host + gpu < devices] for host in hosts for group in groups]
    return [group for group in found if len(group) > 1]


class _Copies:
    """A copy each way between pinned memory and one GPU, on a stream of its own.

    Written against torch 2.13 and not yet run: no GPU was at hand.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outgoing, self._incoming = self._pair(), self._pair()

    def out(self) -> None:
        self._copy(*self._outgoing)

    def back(self) -> None:
        gpu, host, stream = self._incoming
        self._copy(host, gpu, stream)

    def _pair(self) -> tuple[Tensor, Tensor, torch.cuda.Stream]:
        on_gpu = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return on_gpu, torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True), stream

    @staticmethod
    def _copy(source: Tensor, target: Tensor, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)


def _seconds(copies: Sequence[Callable[[], None]]) -> float:
    """All at once, until the last is done: the median of a few times, after one that does not count."""
    taken = []
    for _ in range(REPEATS + 1):
        _synchronize_all()
        begin = perf_counter()
        for copy in copies:
            copy()
        _synchronize_all()
        taken.append(perf_counter() - begin)
    return median(taken[1:])


def _synchronize_all() -> None:
    for d in range(torch.cuda.device_count()):
        torch.cuda.synchronize(d)
