"""Recording of one step by all processes, with aligned clocks.

Clocks are aligned by Cristian's algorithm: a clock that another process reads between rank 0's send and the arrival of
the reply was read between these two times of rank 0. So every round trip gives an interval for the offset; the estimate
is the middle of their intersection, with half of its width as error. Between processes on one host the error is 0 if
the interval agrees with the kernel's clock, which they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import torch
import torch.distributed as dist

from optpipe.runtime.messages import Tree
from optpipe.runtime.pipeline import Pipeline
from optpipe.runtime.recorder import (
    CudaMemoryRecorder,
    CudaRecorder,
    HostRecorder,
    MemoryMeter,
    MemoryRecorder,
    MemoryUse,
    Timing,
)
from optpipe.runtime.transport import peer_errors
from optpipe.trace.document import ActionRow, Part

ROUNDS = 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Clock:
    """This process's clock minus rank 0's, in nanoseconds, known to plus or minus `error_ns`."""

    offset_ns: int = 0
    error_ns: int = 0


CPU = torch.device("cpu")


def align_clocks(group: dist.ProcessGroup | None = None, device: torch.device = CPU) -> Clock:
    """Align the clocks of all processes of a group (None: the default one), which sends tensors on `device`.

    Collective. Raises RunFailedError if one of them has ended.
    """
    rank = dist.get_rank(group)
    clock = Clock()
    with peer_errors("the clocks of all processes"):
        for other in range(1, dist.get_world_size(group)):
            link = _Link(group, device, 0 if rank else other)
            if rank == 0:
                _answer(link)
            elif rank == other:
                clock = _ask_rank_0(link)
        dist.barrier(group)
    return clock


def estimate(rounds: list[tuple[int, int, int]], same_host: bool) -> Clock:
    """Estimate the clock from round trips (sent by rank 0, read here, back at rank 0), each time by its own clock.

    If a clock drifted, so that no offset fits all rounds, the fastest round counts.
    """
    least = max(here - back for _, here, back in rounds)
    most = min(here - sent for sent, here, _ in rounds)
    if least > most:
        sent, here, back = min(rounds, key=lambda times: times[2] - times[0])
        least, most = here - back, here - sent
    if same_host and least <= 0 <= most:
        return Clock()
    return Clock((least + most) // 2, (most - least + 1) // 2)


@dataclass(frozen=True)
class _Link:
    """Sends and receives integers to and from one other rank of a group."""

    group: dist.ProcessGroup | None
    device: torch.device
    other: int

    def send(self, values: torch.Tensor) -> None:
        dist.send(values.to(self.device), group=self.group, group_dst=self.other)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        values = torch.zeros(shape, dtype=dtype, device=self.device)
        dist.recv(values, group=self.group, group_src=self.other)
        return values.cpu()


def _answer(link: _Link) -> None:
    """Run the round trips on rank 0, and send their times and the host's identity to the other process."""
    rounds = []
    for _ in range(ROUNDS):
        sent_ns = perf_counter_ns()
        link.send(torch.tensor([sent_ns]))
        here = link.receive((1,))
        rounds.append((sent_ns, int(here), perf_counter_ns()))
    link.send(torch.tensor(rounds))
    link.send(_host())


def _ask_rank_0(link: _Link) -> Clock:
    host = _host()
    for _ in range(ROUNDS):
        link.receive((1,))
        link.send(torch.tensor([perf_counter_ns()]))
    rounds = link.receive((ROUNDS, 3))
    theirs = link.receive(tuple(host.shape), host.dtype)
    same_host = bool(host.any()) and torch.equal(host, theirs)
    return estimate([(sent, here, back) for sent, here, back in rounds.tolist()], same_host)


def _host() -> torch.Tensor:
    """Identity of the running kernel, 36 bytes; zeros if it has none."""
    name = _BOOT_ID.read_bytes().strip() if _BOOT_ID.exists() else b""
    return torch.frombuffer(bytearray(name.ljust(36, b"\0")[:36]), dtype=torch.uint8)


def record_step(
    pipeline: Pipeline,
    inputs: Sequence[Tree],
    targets: Sequence[Tree],
    *,
    process: int = 0,
    device: torch.device = CPU,
) -> Part:
    """Run a batch twice and return the actions of this process's devices; changes gradients, but no weight.

    Collective: every process passes its own number and hardware. Warm up before: the first steps of a process are
    slower.
    """
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        uses = _memory(pipeline, inputs, targets, device)
        clock = align_clocks() if dist.is_initialized() else Clock()
        times = CudaRecorder() if device.type == "cuda" else HostRecorder()
        pipeline.run(inputs, targets, recorder=times)
        timings = times.timings()
    return Part(process, (clock.error_ns + times.clock_error_ns) / 1000, _rows(timings, uses, clock))


def _memory(
    pipeline: Pipeline, inputs: Sequence[Tree], targets: Sequence[Tree], device: torch.device
) -> Sequence[MemoryUse]:
    if device.type == "cuda":
        allocator = CudaMemoryRecorder()
        pipeline.run(inputs, targets, recorder=allocator)
        return allocator.uses()
    meter = MemoryMeter()
    counted = MemoryRecorder(meter)
    pipeline.run(inputs, targets, meter, counted)
    return counted.uses()


def _rows(timings: Sequence[Timing], uses: Sequence[MemoryUse], clock: Clock) -> dict[int, list[ActionRow]]:
    """Actions of each device in order, which is the same in both runs."""
    rows: dict[int, list[ActionRow]] = {}
    memory = {(use.device, use.action.key): use for use in uses}
    for timing in timings:
        action, use = timing.action, memory[timing.device, timing.action.key]
        begin_ns, start_ns, end_ns = (time_ns - clock.offset_ns for time_ns in timing[2:])
        row = ActionRow(*action.key, action.peer, begin_ns, start_ns, end_ns, use.peak_bytes, use.after_bytes)
        rows.setdefault(timing.device, []).append(row)
    return rows
