"""Compute-only CSV: a schedule for the runtime of torch.distributed.pipelining.

`_PipelineScheduleRuntime._load_csv(path, format="compute_only")` reads it (torch 2.13) and adds sends and receives
itself. One row a rank, one cell an op: stage, letter, microbatch, such as ``2F0``. Torch's letters are F, I for our B
(backward input), W, and B for our BW (the whole backward). B and W side by side stay I and W.

Torch takes the rank of a stage from the row in which it stands: any placement will do, V and interleaved too, and
nothing else is to be passed. The caller makes a `PipelineStage` on each rank for exactly the stages of its row and
sets `n_microbatches` to the problem's; docs/torch.md shows how.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from optpipe.errors import InputError, Issue
from optpipe.ops import Op, Orders
from optpipe.schedule import DevicePlan, Schedule
from optpipe.simulate import simulate
from optpipe.worst_case_memory import worst_case_peak_bytes

_LETTERS = {"F": "F", "B": "I", "W": "W", "BW": "B"}


def torch_csv(schedule: Schedule, *, drop_offload: bool = False) -> str:
    """The file as text; with `drop_offload` without offloads and reloads, and the compute ops in their order.

    Waits are left out: they hold compute ops back for copies only. Raises InputError where torch's runtime cannot run
    the schedule, OrderError and DeadlockError where nothing could.
    """
    issues = [*_empty_devices(schedule), *([] if drop_offload else _offloads(schedule))]
    if issues:
        raise InputError(issues)
    compute = [device.compute.ops for device in schedule.devices]
    simulate(schedule.problem, Orders.of_compute(compute))  # refuses every order that cannot run
    return "".join(_row(ops) for ops in compute)


def peak_bytes_without_offload(schedule: Schedule) -> Sequence[int]:
    """For each device the largest memory under any timing when every activation stays on it."""
    return [_peak_bytes(schedule, device) for device in schedule.devices]


def _peak_bytes(schedule: Schedule, device: DevicePlan) -> int:
    return worst_case_peak_bytes(schedule.problem, (device.compute.ops, (), ()), {})


def _row(ops: Sequence[Op]) -> str:
    return ",".join(f"{op.stage}{_LETTERS[op.kind]}{op.microbatch}" for op in ops) + "\n"


def _empty_devices(schedule: Schedule) -> Iterator[Issue]:
    """Torch refuses a rank without a stage."""
    for d, stages in enumerate(schedule.problem.stages_of):
        if not stages:
            detail = "has no stage, but torch's runtime needs one on every rank. Maybe leave the device out and solve"
            yield Issue(("problem", "devices", d), "no_stage", f"{detail} again.")


def _offloads(schedule: Schedule) -> Iterator[Issue]:
    """Torch has no action for a copy to the host."""
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
