"""Compute-only CSV: a schedule for the runtime of torch.distributed.pipelining.

`_PipelineScheduleRuntime._load_csv(path, format="compute_only")` reads it (torch 2.13) and adds sends and receives
itself. One row per rank, one cell per op: stage, letter, microbatch, such as ``2F0``. Torch's letters are F, I for our
B (backward input), W, and B for our BW (the whole backward). Adjacent B and W stay I and W.

Torch takes the rank of a stage from its row, so any placement works, including V and interleaved. The caller makes a
`PipelineStage` on each rank for exactly the stages of its row and sets `n_microbatches` to the problem's; docs/torch.md
shows how.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from optpipe.errors import InputError, Issue
from optpipe.ops import KINDS, Orders
from optpipe.schedule import DevicePlan, Schedule
from optpipe.simulate import simulate
from optpipe.worst_case_memory import worst_case_peak_bytes

_LETTERS = {"F": "F", "B": "I", "W": "W", "BW": "B"}


def torch_csv(schedule: Schedule, *, drop_offload: bool = False) -> str:
    """Text of the file; with `drop_offload` only the compute ops of a schedule with offload.

    Waits are left out: compute ops wait for copies only. Raises InputError if torch's runtime cannot run the schedule,
    OrderError and DeadlockError if no executor can.
    """
    issues = [*_recomputations(schedule), *_empty_devices(schedule), *([] if drop_offload else _offloads(schedule))]
    if issues:
        raise InputError(issues)
    compute = [device.compute.ops for device in schedule.devices]
    simulate(schedule.problem, Orders.of_compute(compute))  # raises if the orders cannot run
    return "".join(",".join(f"{op.stage}{_LETTERS[op.kind]}{op.microbatch}" for op in ops) + "\n" for ops in compute)


def _recomputations(schedule: Schedule) -> Iterator[Issue]:
    """Devices that recompute activations: torch has no action for that."""
    for d, device in enumerate(schedule.devices):
        again = np.flatnonzero(~np.isin(device.compute.ops.kind, [KINDS.index(kind) for kind in _LETTERS]))
        if len(again):
            detail = f"has {len(again)} ops that recompute, the first {device.compute.ops[int(again[0])]}, but torch's "
            yield Issue(("devices", d, "compute"), "recomputation", f"{detail}runtime has none.")


def peak_bytes_without_offload(schedule: Schedule) -> Sequence[int]:
    """Worst-case peak of each device if every activation stays on it."""
    return [_peak_bytes(schedule, device) for device in schedule.devices]


def _peak_bytes(schedule: Schedule, device: DevicePlan) -> int:
    return worst_case_peak_bytes(schedule.problem, (device.compute.ops, (), ()), {})


def _empty_devices(schedule: Schedule) -> Iterator[Issue]:
    """Devices without a stage: torch rejects such a rank."""
    for d, stages in enumerate(schedule.problem.stages_of):
        if not stages:
            detail = "has no stage, but torch's runtime needs one on every rank. Maybe leave the device out and solve"
            yield Issue(("problem", "devices", d), "no_stage", f"{detail} again.")


def _offloads(schedule: Schedule) -> Iterator[Issue]:
    """Devices with offload: torch has no action for copies to the host."""
    for d, device in enumerate(schedule.devices):
        if len(device.offload):
            budget = schedule.problem.devices[d].memory_bytes
            yield Issue(
                ("devices", d, "offload"),
                "offload",
                f"has {len(device.offload)} ops, but torch's runtime has none for offload. Maybe drop them "
                f"(--drop-offload) if the device has {_peak_bytes(schedule, device)} bytes (budget: "
                f"{'no limit' if budget is None else f'{budget} bytes'}).",
            )
