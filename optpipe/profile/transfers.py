"""Measured bandwidth and latency of messages and host copies, alone and under contention.

Devices of one process exchange messages by a copy in memory (mailbox), or on a GPU by copies on streams; processes by
gloo, or by NCCL between GPUs, where half of a round trip is the time of a message.

Contention of host copies is measured on GPUs only: on the CPU the computing thread copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
from optpipe.runtime.transport import local_transport, peer_errors

REPEATS = 20
WARM_UP = 5


@dataclass(frozen=True)
class Transfers:
    """Times by boundary, None if both stages are on one device, and a description of the transport."""

    transport: str
    spreads: Sequence[Spread | None]

    def bytes_per_us(self, message_bytes: Sequence[int]) -> float | None:
        """Rate over all measured boundaries, in bytes per microsecond; None if none was measured."""
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
    """Measure the time of every boundary's message; between processes always on the wall clock.

    Collective under torchrun, where rank = device. Raises RunFailedError if a process has ended.
    """
    processes, group = dist.is_initialized(), None
    transport = (
        "copies between streams of one process" if device.type == "cuda" else "mailbox copies within one process"
    )
    if processes:
        transport = "NCCL between processes" if device.type == "cuda" else "gloo between processes"
        if device.type == "cuda":
            with peer_errors("the group in which GPUs send"):
                group = dist.new_group(backend="nccl")
    own_spreads: dict[str, Any] = {}
    spread: Spread | None
    for b, spec in enumerate(messages):
        pair = placement[b], placement[b + 1]
        if pair[0] == pair[1]:
            continue
        if processes:
            with peer_errors(f"the message to be timed between stages {b} and {b + 1}"):
                spread = _between_processes(pair, spec, device, group)
        else:
            spread = _within_process(pair, spec, device, clock)
        if spread:
            own_spreads[str(b)] = asdict(spread)
    spreads = {int(b): Spread(**data) for part in gather(own_spreads) for b, data in part.items()}
    return Transfers(transport, [spreads.get(b) for b in range(len(messages))])


def _within_process(pair: tuple[int, int], spec: Spec, device: torch.device, clock: ClockName) -> Spread:
    watch, transport = stopwatch_for(device, clock), local_transport(device)
    tensors = [part.empty(device).zero_() for part in leaves(spec)]

    def hand_over() -> None:
        for tensor, part in zip(tensors, leaves(spec), strict=True):
            receipt = transport.post_receive(*pair, part, device)
            transport.send(*pair, tensor)
            receipt.wait()

    return _repeated(watch, hand_over)


def _between_processes(
    pair: tuple[int, int], spec: Spec, device: torch.device, group: dist.ProcessGroup | None
) -> Spread | None:
    """Time a message between a pair of ranks; returns None on all others, which wait to keep the network idle."""
    spread = None
    if dist.get_rank() in pair:
        first = dist.get_rank() == pair[0]
        partner = pair[1] if first else pair[0]
        tensors = [part.empty(device).zero_() for part in leaves(spec)]

        def round_trip() -> None:
            for operation in (dist.send, dist.recv) if first else (dist.recv, dist.send):
                for tensor in tensors:
                    operation(tensor, partner, group=group)

        trip = _repeated(stopwatch_for(device), round_trip)
        spread = Spread(trip.median_us / 2, trip.lower_us / 2, trip.upper_us / 2, trip.count)
    dist.barrier()
    return spread


def _repeated(watch: Stopwatch, work: Callable[[], None]) -> Spread:
    key = Key("transfer", 0)
    for _ in range(WARM_UP):
        work()
    for _ in range(REPEATS):
        watch.time(key, work)
    return spread_of(watch.samples_us()[key])


SLOWDOWN_LIMIT = 1.5
"""Threshold of the slowdown of two simultaneous copies: 1 if they are independent, 2 if they share a channel."""

COPY_BYTES = 256 * 2**20
CONTENTION_REPEATS = 5


@dataclass(frozen=True)
class Contention:
    """Copy channels, and a description of how they were measured."""

    channels: CopyChannels
    how: str


def measure_contention(device: torch.device, devices: int) -> Contention:
    """Measure contention between the visible GPUs, taken as typical of all hosts; without GPUs return the defaults."""
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
    """Measure contention on rank 0 for all processes. Collective under torchrun."""
    leads = not dist.is_initialized() or dist.get_rank() == 0
    own = measure_contention(device, devices) if leads else None
    shared = next(data for data in gather(own and {"channels": own.channels.to_data(), "how": own.how}) if data)
    return Contention(CopyChannels.from_data(shared["channels"]), shared["how"])


def shares(alone: float, together: float) -> bool:
    """Return whether two copies share a channel that take `alone` each and `together` at once."""
    return together > SLOWDOWN_LIMIT * alone


def groups_of(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Connected components of the pairs that share a channel, each in ascending order."""
    groups: list[set[int]] = []
    for pair in pairs:
        touched = [group for group in groups if not group.isdisjoint(pair)]
        groups = [group for group in groups if group not in touched] + [set(pair).union(*touched)]
    return sorted(sorted(group) for group in groups)


def on_all_hosts(groups: Sequence[Sequence[int]], gpus: int, devices: int) -> list[list[int]]:
    """Repeat the groups of a host with `gpus` GPUs for as many equal hosts as `devices` fill."""
    hosts = range(0, devices, gpus)
    on_hosts = [[host + gpu for gpu in group if host + gpu < devices] for host in hosts for group in groups]
    return [group for group in on_hosts if len(group) > 1]


class _Copies:
    """Copies in both directions between pinned memory and one GPU, each on its own stream.

    Written against torch 2.13, not yet tested on a GPU.
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
    """Median time of running all copies at once, after one untimed run."""
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
