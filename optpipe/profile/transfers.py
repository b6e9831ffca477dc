"""How long a message takes from one device to the next, by the way that messages go here.

Devices of one process hand over by a copy in memory (mailbox), or on a GPU by copies on streams; processes by gloo, or
by NCCL between GPUs, where a message is sent there and back and half of that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optpipe.profile.timing import ClockName, Key, Spread, Stopwatch, spread_of, stopwatch_for
from optpipe.runtime.exchange import exchanging
from optpipe.runtime.local import local_transport
from optpipe.runtime.messages import Spec, leaves
from optpipe.runtime.transport import Transport

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
            with exchanging(f"the message to be timed between stages {b} and {b + 1}"):
                found = _between_processes(pair, spec, device, group)
        else:
            found = _within_process(pair, spec, device, clock)
        if found:
            mine[str(b)] = asdict(found)
    spreads = {int(b): Spread(**data) for part in gather(mine) for b, data in part.items()}
    return Transfers(_way(processes, device), [spreads.get(b) for b in range(len(messages))])


def _nccl_group() -> dist.ProcessGroup:
    with exchanging("the group in which GPUs send"):
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
