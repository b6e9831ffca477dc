"""Profiles as Megatron-LM's ranks write them (`rank-0.json.gz`), of a schedule that has run at its simulated times.

Megatron-LM marks no ranges itself. With `--use-pytorch-profiler --pytorch-profiler-collect-callstack` its profiles have
the frames of `schedules.py`, and within `forward_step` that of the training script, which has the same name. On a GPU
the host is ahead: frames say when kernels were launched, by the main thread or, in a backward, by autograd's, and each
kernel has the correlation number of its launch. Messages between ranks are kernels of NCCL, whose times are waits.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate

SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"
FRAMES = {"F": f"{SCHEDULES}(403): forward_step", "BW": f"{SCHEDULES}(539): backward_step"}
MAIN, AUTOGRAD, STREAM, SEND_STREAM = 4100, 4211, 7, 28
AHEAD_US = 5.0
"""Time by which the host code of an op begins before its kernel; the code takes a fifth of that."""


def megatron_problem(p: int, chunks: int, m: int) -> Problem:
    """Stages of different lengths, stage s on rank s mod p."""
    stages = [
        {
            "device": s % p,
            "forward_us": 20.0 + s,
            "backward_input_us": 20.0 + s,
            "backward_weight_us": 20.0 + s,
            "activation_bytes": 1,
            "backward_weight_bytes": 1,
        }
        for s in range(p * chunks)
    ]
    devices = [{"memory_bytes": None}] * p
    data = {"format": "optpipe.problem/1", "name": "profiled", "microbatches": m, "devices": devices, "stages": stages}
    return Problem.from_data(data)


def megatron_orders(p: int, chunks: int, m: int, group: int | None = None) -> Orders:
    """The order of each rank by `get_pp_rank_microbatches` and `get_schedule_table` of Megatron-LM's core 0.20."""
    group = group or p
    table = [
        (chunk, i)
        for first in range(0, m, group)
        for chunk in range(chunks)
        for i in range(first, min(first + group, m))
    ]
    devices = []
    for rank in range(p):
        forwards = [Op("F", chunk * p + rank, i) for chunk, i in table]
        backwards = [Op("BW", (chunks - 1 - chunk) * p + rank, i) for chunk, i in table]
        ahead = p - 1 - rank if chunks == 1 else 2 * (p - 1 - rank) + (chunks - 1) * group
        order = forwards[:ahead]
        for k, backward in enumerate(backwards):
            order += [*forwards[ahead + k : ahead + k + 1], backward]
        devices.append(order)
    return Orders.of_compute(devices)


def write_profiles(folder: Path, problem: Problem, orders: Orders, *, steps: int = 2, gpu: bool = True) -> list[Path]:
    """One file a rank; steps follow one another at once, and the clock begins at a second."""
    simulation = simulate(problem, orders)
    start = dict(zip(simulation.ops, simulation.start_us.tolist(), strict=True))
    end = dict(zip(simulation.ops, simulation.end_us.tolist(), strict=True))
    paths = []
    for rank, device in enumerate(orders.devices):
        events: list[dict[str, Any]] = []
        for step in range(steps):
            begin = 1e6 + step * simulation.value_us
            for op in device.compute:
                events += _op(op.kind, begin + start[op], begin + end[op], len(events), gpu=gpu)
        data = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}] if gpu else [],
            "baseTimeNanoseconds": 0,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": len(orders.devices)},
            "traceEvents": [*events, {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}],
        }
        paths.append(folder / f"rank-{rank}.json.gz")
        paths[-1].write_bytes(gzip.compress(json.dumps(data).encode()))
    return paths


def _op(kind: str, start_us: float, end_us: float, number: int, *, gpu: bool) -> list[dict[str, Any]]:
    """Frames of an op, and on a GPU two kernels, launched one after the other, and a message before them."""
    host_us, took_us = (start_us - AHEAD_US, AHEAD_US / 5) if gpu else (start_us, end_us - start_us)

    def event(name: str, cat: str, ts: float, dur: float, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}

    events = [
        event(f"{SCHEDULES}(1385): {'forward' if kind == 'F' else 'backward'}_step_helper", "python_function",
              host_us - 0.2, took_us + 0.2, MAIN),
        event(FRAMES[kind], "python_function", host_us, took_us, MAIN),
    ]  # fmt: skip
    if kind == "F":
        events.append(event("pretrain_gpt.py(187): forward_step", "python_function", host_us, took_us / 2, MAIN))
    if not gpu:
        return events
    thread, middle_us = (MAIN if kind == "F" else AUTOGRAD), (start_us + end_us) / 2
    spans = [("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", start_us - 3, start_us, SEND_STREAM)]
    spans += [("sm90_xmma_gemm_bf16bf16", start_us, middle_us, STREAM), ("gelu", middle_us, end_us, STREAM)]
    for k, (name, begin, done, stream) in enumerate(spans):
        launched = host_us + took_us * (k + 1) / 4
        events.append(event("cudaLaunchKernel", "cuda_runtime", launched, 0.1, thread, correlation=number + k))
        events.append(event(name, "kernel", begin, done - begin, stream, stream=stream, correlation=number + k))
    return events
