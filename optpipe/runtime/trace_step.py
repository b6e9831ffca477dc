"""Records one step of a pipeline: once for its times, once for its memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from optpipe.runtime.interpreter import Pipeline
from optpipe.runtime.memory_meter import MemoryMeter
from optpipe.runtime.messages import Tree
from optpipe.runtime.trace import HostRecorder, MemoryRecorder, MemoryUse, Timing
from optpipe.runtime.trace_clock import Clock, align_clocks
from optpipe.runtime.trace_cuda import CudaMemoryRecorder, CudaRecorder
from optpipe.trace.assemble import ActionRow, Part

CPU = torch.device("cpu")


def record_step(
    pipeline: Pipeline,
    inputs: Sequence[Tree],
    targets: Sequence[Tree],
    *,
    process: int = 0,
    device: torch.device = CPU,
) -> Part:
    """Run a batch twice, and return what this process's devices did; changes no weight, but sets gradients.

    Called in every process of the run, each with its own number and the hardware that it works on. Warm up before:
    the first steps of a process take longer.
    """
    with _on(device):
        uses = _memory(pipeline, inputs, targets, device)
        clock = align_clocks() if dist.is_initialized() else Clock()
        times = CudaRecorder() if device.type == "cuda" else HostRecorder()
        pipeline.run(inputs, targets, recorder=times)
        timings = times.timings()
    return Part(process, (clock.error_ns + times.clock_error_ns) / 1000, _rows(timings, uses, clock))


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
    """Each device's actions in its order, the same in both runs."""
    rows: dict[int, list[ActionRow]] = {}
    memory = {(use.device, use.action.key): use for use in uses}
    for timing in timings:
        action, use = timing.action, memory[timing.device, timing.action.key]
        begin_ns, start_ns, end_ns = (time_ns - clock.offset_ns for time_ns in timing[2:])
        row = ActionRow(*action.key, action.peer, begin_ns, start_ns, end_ns, use.peak_bytes, use.after_bytes)
        rows.setdefault(timing.device, []).append(row)
    return rows
