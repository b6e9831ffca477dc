"""Measured bandwidth and latency of messages and host copies, alone and under contention.

Devices of one process hand over by a copy in memory (mailbox), or on a GPU by copies on streams; processes by gloo, or
by NCCL between GPUs, where a message is sent there and back and half of that counts.

On the CPU there is nothing to find out: the thread that computes copies too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optpipe.problem import CopyChannels
from optpipe.profile.ops import ClockName, Key, Spread, Stopwatch, spread_of, stopwatch_for
from optpipe.runtime.messages import Spec, leaves
from optpipe.runtime.transport import Transport, local_transport, peer_errors

REPEATS = 20
WARM_UP = 5


@dataclass(frozen=True)
class Transfers:
    """The times of the boundaries, None where both stages are on one device, and `way`: what the messages went by."""

    way: str
    spreads: Sequence[Spread | None]

    def bytes_per_us(self, message_bytes: Sequence[int]) -> float | None:
        """The rate over all boundaries that were measured."""
        timed = [(spread.median_us, size) for spread, size in zip(self.spreads, message_bytes, strict=True) if spread]
        total_us = sum(time_us for time_us, _ in timed)
        return sum(size for _, size in timed) / total_us if total_us else None


def measure_transfers(
    placement: Sequence[int],
    messages: Sequence[Spec],
    device: torch.device,
    clock: ClockName = "wall",
    gather: Callable[[Any], list[Any]] = lambda value: [value],
) -> Transfers:
    """The time of every boundary's message; between processes always on the wall clock.

    Under torchrun, where rank = device, called by all processes together. Raises RunFailedError where one has ended.
    """
    processes = dist.is_initialized()
    group = _nccl_group() if processes and device.type == "cuda" else None
    mine: dict[str, Any] = {}
    found: Spread | None
    for b, spec in enumerate(messages):
        pair = placement[b], placement[b + 1]
        if pair[0] == pair[1]:
            continue
        if processes:
            with peer_errors(f"the message to be timed between stages {b} and {b + 1}"):
                found = _between_processes(pair, spec, device, group)
        else:
            found = _within_process(pair, spec, device, clock)
        if found:
            mine[str(b)] = asdict(found)
    spreads = {int(b): Spread(**data) for part in gather(mine) for b, data in part.items()}
    return Transfers(_way(processes, device), [spreads.get(b) for b in range(len(messages))])


def _nccl_group() -> dist.ProcessGroup:
    with peer_errors("the group in which GPUs send"):
        group: dist.ProcessGroup = dist.new_group(backend="nccl")
    return group


def _way(processes: bool, device: torch.device) -> str:
    if processes:
        return "NCCL between processes" if device.type == "cuda" else "gloo between processes"
    return "copies between streams of one process" if device.type == "cuda" else "mailbox copies within one process"


def _within_process(pair: tuple[int, int], spec: Spec, device: torch.device, clock: ClockName) -> Spread:
    watch, transport = stopwatch_for(device, clock), local_transport(device)
    tensors = [part.empty(device).zero_() for part in leaves(spec)]

    def hand_over() -> None:
        for tensor, part in zip(tensors, leaves(spec), strict=True):
            _send_and_wait(transport, pair, tensor, part, device)

    return _repeated(watch, hand_over)


def _send_and_wait(
    transport: Transport, pair: tuple[int, int], tensor: Tensor, spec: Any, device: torch.device
) -> None:
    receipt = transport.post_receive(*pair, spec, device)
    transport.send(*pair, tensor)
    receipt.wait()


def _between_processes(
    pair: tuple[int, int], spec: Spec, device: torch.device, group: dist.ProcessGroup | None
) -> Spread | None:
    """None in processes that are not of the pair. Others wait, so that nothing else is on the wire."""
    found = None
    if dist.get_rank() in pair:
        rooms = [part.empty(device).zero_() for part in leaves(spec)]
        there, back = partial(_send_all, rooms, group=group), partial(_receive_all, rooms, group=group)
        first, other = (there, back) if dist.get_rank() == pair[0] else (back, there)
        partner = pair[1] if dist.get_rank() == pair[0] else pair[0]

        def round_trip() -> None:
            first(partner)
            other(partner)

        trip = _repeated(stopwatch_for(device), round_trip)
        found = Spread(trip.median_us / 2, trip.lower_us / 2, trip.upper_us / 2, trip.count)
    dist.barrier()
    return found


def _send_all(tensors: Sequence[Tensor], partner: int, *, group: dist.ProcessGroup | None) -> None:
    for tensor in tensors:
        dist.send(tensor, partner, group=group)


def _receive_all(tensors: Sequence[Tensor], partner: int, *, group: dist.ProcessGroup | None) -> None:
    for tensor in tensors:
        dist.recv(tensor, partner, group=group)


def _repeated(watch: Stopwatch, work: Callable[[], None]) -> Spread:
    key = Key("transfer", 0)
    for _ in range(WARM_UP):
        work()
    for _ in range(REPEATS):
        watch.time(key, work)
    return spread_of(watch.samples_us()[key])


SLOWDOWN_LIMIT = 1.5
"""Two copies at once that take longer than so many alone share a channel: independent ones take 1, sharing ones 2."""

COPY_BYTES = 256 * 2**20
CONTENTION_REPEATS = 5


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
    for _ in range(CONTENTION_REPEATS + 1):
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
