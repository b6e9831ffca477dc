"""Compute-only CSV: a schedule for the runtime of torch.distributed.pipelining.

`_PipelineScheduleRuntime._load_csv(path, format="compute_only")` reads it (torch 2.13) and adds sends and receives
itself. One row per rank, one cell per op: stage, letter, microbatch, such as ``2F0``. Torch's letters are F, I for our
B (backward input), W, and B for our BW (the whole backward). Adjacent B and W stay I and W.

Torch takes the rank of a stage from its row, so any placement works, including V and interleaved. The caller makes a
`PipelineStage` on each rank for exactly the stages of its row and sets `n_microbatches` to the problem's; docs/torch.md
shows how.

A backward that recomputes inside itself (CB, CBW) is torch's own backward of a stage whose module is checkpointed, such
as by `torch.utils.checkpoint`. That holds for all microbatches of the stage. Torch has nothing for C, which recomputes
ahead of the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from optpipe.errors import InputError, Issue
from optpipe.ops import KINDS, OpArray, Orders
from optpipe.schedule import DevicePlan, Schedule
from optpipe.simulate import simulate
from optpipe.worst_case_memory import worst_case_peak_bytes

_LETTERS = {"F": "F", "B": "I", "W": "W", "BW": "B", "CB": "I", "CBW": "B"}


def torch_csv(schedule: Schedule, *, drop_offload: bool = False) -> str:
    """Text of the file; with `drop_offload` only the compute ops of a schedule with offload.

    Waits are left out: compute ops wait for copies only. Raises InputError if torch's runtime cannot run the schedule,
    OrderError and DeadlockError if no executor can.
    """
    issues = [
        *_slices(schedule),
        *_recomputations(schedule),
        *_empty_devices(schedule),
        *([] if drop_offload else _offloads(schedule)),
    ]
    if issues:
        raise InputError(issues)
    if _recomputing_stages(schedule):
        simulate(schedule.problem, schedule.orders)  # raises if some backward recomputes what its mode keeps
    compute = [_as_torch_runs(device.compute.ops) for device in schedule.devices]
    orders = replace(Orders.of_compute(compute), microbatch_order=schedule.orders.microbatch_order)
    simulate(schedule.problem, orders)  # raises if the orders cannot run
    return "".join(",".join(f"{op.stage}{_LETTERS[op.kind]}{op.microbatch}" for op in ops) + "\n" for ops in compute)


def _slices(schedule: Schedule) -> Iterator[Issue]:
    """Units of which torch knows nothing: its stages run a microbatch whole, all of one shape."""
    problem = schedule.problem
    if problem.slice_count > 1:
        detail = f"is {problem.slice_count}, but torch's runtime runs microbatches whole. Maybe leave slices out"
        yield Issue(("problem", "slices", "count"), "slices", f"{detail} of the problem.")
    for i, factors in enumerate(problem.microbatch_factors or []):
        if factors.bytes != 1 or factors.transfer != 1:
            detail = "makes this microbatch of another size, but torch's runtime receives all in one shape"
            fix = "Maybe pad them to one length, and leave bytes and transfer out"
            yield Issue(("problem", "microbatch_factors", i), "unequal_microbatches", f"{detail}. {fix}.")
            return


def checkpointed_stages(schedule: Schedule) -> dict[int, str]:
    """The activation mode of each stage that recomputes inside its backwards, and whose module is to be checkpointed.

    The schedule is one that `torch_csv` exports: all microbatches of such a stage are in one mode.
    """
    modes = schedule.modes
    if modes is None:
        return {}
    return {s: schedule.problem.stages[s].choices[modes[s, 0]].name for s in _recomputing_stages(schedule)}


def _recomputing_stages(schedule: Schedule) -> list[int]:
    inside = [KINDS.index("CB"), KINDS.index("CBW")]
    columns = [device.compute.ops for device in schedule.devices]
    return sorted({s for ops in columns for s in ops.stage[np.isin(ops.kind, inside)].tolist()})


def _as_torch_runs(ops: OpArray) -> OpArray:
    """The ops with plain backwards: what these recompute is the module's own affair."""
    plain = np.arange(len(KINDS))
    plain[[KINDS.index("CB"), KINDS.index("CBW")]] = KINDS.index("B"), KINDS.index("BW")
    return OpArray(plain[ops.kind], ops.stage, ops.microbatch)


def _recomputations(schedule: Schedule) -> Iterator[Issue]:
    """Recomputation of which torch knows nothing: ahead of a backward, or of some microbatches of a stage."""
    for d, device in enumerate(schedule.devices):
        ahead = np.flatnonzero(device.compute.ops.kind == KINDS.index("C"))
        if len(ahead):
            detail = (
                f"has {len(ahead)} ops that recompute ahead of a backward, the first "
                f"{device.compute.ops[int(ahead[0])]}, but torch's runtime has none for that. Maybe leave "
                "stages[].modes out of the problem, or solve it for our own runtime (optpipe.pipelining)."
            )
            yield Issue(("devices", d, "compute"), "recomputation", detail)
    if schedule.modes is None:
        return
    for s, (stage, modes) in enumerate(zip(schedule.problem.stages, schedule.modes, strict=True)):
        names = [stage.choices[mode].name for mode in sorted({*modes.tolist()})]
        recomputes = [mode.recomputes for mode in stage.choices]
        if len(names) > 1 and any(recomputes[mode] for mode in modes):
            detail = (
                f"has microbatches in modes {', '.join(names)}, but a module is checkpointed for all of them or for "
                "none. Maybe give the stage one mode that keeps less, and no other."
            )
            yield Issue(("problem", "stages", s, "modes"), "mixed_modes", detail)


def peak_bytes_without_offload(schedule: Schedule) -> Sequence[int]:
    """Worst-case peak of each device if every activation stays on it."""
    return [_peak_bytes(schedule, device) for device in schedule.devices]


def _peak_bytes(schedule: Schedule, device: DevicePlan) -> int:
    return worst_case_peak_bytes(schedule.problem, (device.compute.ops, (), ()), {}, schedule.modes)


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
