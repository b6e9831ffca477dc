"""The schedule CSV of torch.distributed.pipelining, written and read.

Written is its compute-only form, for torch's runtime:

`_PipelineScheduleRuntime._load_csv(path, format="compute_only")` reads it (torch 2.13) and adds sends and receives
itself. One row per rank, one cell per op: stage, letter, microbatch, such as ``2F0``. Torch's letters are F, I for our
B (backward input), W, and B for our BW (the whole backward). Adjacent B and W stay I and W.

Torch takes the rank of a stage from its row, so any placement works, including V and interleaved. The caller makes a
`PipelineStage` on each rank for exactly the stages of its row and sets `n_microbatches` to the problem's; docs/torch.md
shows how.

A backward that recomputes inside itself (CB, CBW) is torch's own backward of a stage whose module is checkpointed, such
as by `torch.utils.checkpoint`. That holds for all microbatches of the stage. Torch has nothing for C, which recomputes
ahead of the backward.

Read are both forms that torch's schedule classes dump. Of the lowered one the actions that are no compute (sends,
receives, gathers and reductions of FSDP) are left out. B with a W of the same stage and microbatch is the backward
for the input, as torch once wrote it, otherwise the whole one. An OVERLAP_F_B is a block where the problem's `overlaps`
have its stages, otherwise its two halves one after the other. A file has no costs: `read_torch_csv` takes those of a
problem, or `OP_US` and `ACTIVATION_BYTES`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optpipe.document import MOST_ISSUES, utf8_text
from optpipe.document_kinds import TORCH_ACTION
from optpipe.errors import InputError, Issue, shown
from optpipe.fields import MAX_NAME
from optpipe.kinds import CODE, INSIDE, KIND, KIND_OF_TORCH, KINDS, PLAIN_BACKWARD, codes
from optpipe.ops import Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.timed import timed_schedule
from optpipe.units import budget_text
from optpipe.worst_case_memory import worst_case_peak_bytes


def torch_csv(schedule: Schedule, *, drop_offload: bool = False) -> str:
    """Text of the file; with `drop_offload` only the compute ops of a schedule with offload.

    Waits are left out: compute ops wait for copies only. Raises InputError if torch's runtime cannot run the schedule,
    OrderError and DeadlockError if no executor can.
    """
    issues = [
        *_spread_passes(schedule.problem),
        *_slices(schedule),
        *_without_backward(schedule),
        *_recomputations(schedule),
        *_empty_devices(schedule),
        *([] if drop_offload else _offloads(schedule)),
    ]
    if issues:
        raise InputError(issues)
    if _recomputing_stages(schedule):
        simulate(schedule.problem, schedule.orders)  # raises if some backward recomputes what its mode keeps
    compute = [_as_torch_runs(device.compute.ops) for device in schedule.devices]
    own = schedule.orders
    orders = replace(Orders.of_compute(compute), microbatch_order=own.microbatch_order, blocks=own.blocks)
    simulate(schedule.problem, orders)  # raises if the orders cannot run
    return "".join(",".join(_cells(ops, own.blocks)) + "\n" for ops in compute)


def _cells(ops: Sequence[Op], blocks: Mapping[Op, Op]) -> Iterator[str]:
    """A cell for each op, and one for each block, such as ``(0F4;7B0)OVERLAP_F_B``."""
    joined = {*blocks.values()}
    for op in ops:
        cell = f"{op.stage}{KIND[op.kind].torch}{op.microbatch}"
        if op in blocks:
            behind = blocks[op]
            yield f"({cell};{behind.stage}{KIND[behind.kind].torch}{behind.microbatch})OVERLAP_F_B"
        elif op not in joined:
            yield cell


def _spread_passes(problem: Problem) -> Iterator[Issue]:
    """Passes that torch has no action for."""
    if problem.spread:
        detail = f"has the passes {', '.join(problem.pass_names)}, for which torch's runtime has no action"
        fix = "Maybe train with optpipe train, or solve without spread passes"
        yield Issue(("problem", "spread"), "spread_passes", f"{detail}. {fix}.")


def _without_backward(schedule: Schedule) -> Iterator[Issue]:
    for s, stage in enumerate(schedule.problem.stages):
        if stage.backward == "none":
            detail = "is 'none', but torch's runtime sends every stage the gradient of its output"
            fix = "Maybe train with optpipe train or PlannedSchedule, or solve with a backward of 0 us there"
            yield Issue(("problem", "stages", s, "backward"), "no_backward", f"{detail}. {fix}.")
            return


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
    inside = codes(INSIDE)
    columns = [device.compute.ops for device in schedule.devices]
    return sorted({s for ops in columns for s in ops.stage[np.isin(ops.kind, inside)].tolist()})


def _as_torch_runs(ops: OpArray) -> OpArray:
    """The ops with plain backwards: what these recompute is the module's own affair."""
    plain = np.array([CODE[PLAIN_BACKWARD.get(kind, kind)] for kind in KINDS])
    return OpArray(plain[ops.kind], ops.stage, ops.microbatch)


def _recomputations(schedule: Schedule) -> Iterator[Issue]:
    """Recomputation of which torch knows nothing: ahead of a backward, or of some microbatches of a stage."""
    for d, device in enumerate(schedule.devices):
        ahead = np.flatnonzero(device.compute.ops.kind == CODE["C"])
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
    own, problem = schedule.orders, schedule.problem
    return [worst_case_peak_bytes(problem, (one.compute, (), ()), {}, own.modes, own.blocks) for one in own.devices]


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
            memory = budget_text(peak_bytes_without_offload(schedule)[d], schedule.problem.devices[d].memory_bytes)
            yield Issue(
                ("devices", d, "offload"),
                "offload",
                f"has {len(device.offload)} ops, but torch's runtime has none for offload. Maybe drop them "
                f"(--drop-offload), which takes {memory}.",
            )


OP_US = 1000
"""Time of each F, B and W of a file for which no problem is given; a whole backward is B and W."""

ACTIVATION_BYTES = 1000
"""Activation of a microbatch on a stage in such a file; half of it stays from B to W."""

MAX_CSV_BYTES = 64 * 2**20
"""Largest file read: a cell takes about eight bytes, so some eight million actions."""


@dataclass(frozen=True)
class TorchSchedule:
    """A schedule read from a CSV, and what of the file it leaves out.

    `dropped`: actions that are no compute. `overlapped`: pairs in one OVERLAP_F_B that are here one after the other.
    """

    schedule: Schedule
    dropped: int
    overlapped: int


def read_torch_csv(content: bytes, source: str, problem: Problem | None = None) -> TorchSchedule:
    """Read a CSV as torch's schedule classes dump it; `source` names the file.

    `problem` gives costs and budgets; None: every op takes `OP_US`, every activation `ACTIVATION_BYTES`, on as many
    stages, devices and microbatches as the file has. Raises InputError naming rank and cell, or what of the problem
    differs, and DeadlockError for ranks that wait for one another.
    """
    ranks = _ranks(utf8_text(content, source), source)
    letters = [[action.op for action in rank if action.op] for rank in ranks]
    split = {op[1:] for ops in letters for op in ops if op.kind == "W"}
    compute = [
        [Op("B" if op.kind == "B" and op[1:] in split else KIND_OF_TORCH[op.kind], *op[1:]) for op in ops]
        for ops in letters
    ]
    order = [op.microbatch for ops in compute for op in ops if op[:2] == ("F", 0)]
    if issues := [*_misplaced(compute)] or [*_incomplete(compute)] or [*_other_orders(compute, order)]:
        raise InputError(issues[:MOST_ISSUES], source)
    microbatch_order = None if order == sorted(order) else order
    if problem is None:
        problem = _uniform_problem(compute, source, microbatch_order)
    elif issues := [*_misfits(compute, problem, microbatch_order)]:
        raise InputError(issues[:MOST_ISSUES], source)
    pairs = [
        ops[k : k + 2]
        for rank, ops in zip(ranks, compute, strict=True)
        for k in [k for k, action in enumerate(action for action in rank if action.op) if action.overlaps][::2]
    ]
    blocks = {first: last for first, last in pairs if problem.block_of_units_us(first, last) is not None}
    orders = replace(Orders.of_compute(compute), microbatch_order=microbatch_order, blocks=blocks)
    return TorchSchedule(
        timed_schedule(orders, simulate(problem, orders), "torch-csv"),
        dropped=sum(action.op is None for rank in ranks for action in rank),
        overlapped=len(pairs) - len(blocks),
    )


@dataclass(frozen=True)
class _Action:
    """An action of a rank: a compute op with torch's letter as its kind, or None for any other."""

    op: Op | None
    overlaps: bool = False


def _ranks(text: str, source: str) -> list[list[_Action]]:
    """Actions of each rank; empty cells are idle steps. Raises InputError for a cell that is no action."""
    rows = [[cell.strip().strip('"') for cell in line.split(",")] for line in text.rstrip().splitlines()]
    ranks: list[list[_Action]] = []
    issues = []
    for r, row in enumerate(rows):
        ranks.append([])
        for c, cell in enumerate(row):
            try:
                ranks[-1] += _actions(cell)
            except ValueError as error:
                issues.append(Issue("", "no_action", f"rank {r}, cell {c} is {shown(cell)}, but {error}"))
        if not any(row):
            detail = f"rank {r} has no actions. Maybe its row is a blank line, which torch counts as a rank."
            issues.append(Issue("", "no_actions", detail))
    if issues:
        raise InputError(issues[:MOST_ISSUES], source)
    return ranks


def _actions(cell: str) -> Iterator[_Action]:
    """Actions of a cell; two for an OVERLAP_F_B. Raises ValueError."""
    match = TORCH_ACTION.fullmatch(cell)
    if cell and not match:
        raise ValueError("an action is written as stage, letter, microbatch. Maybe 2F0.")
    if match and match["halves"]:
        halves = [TORCH_ACTION.fullmatch(half.strip()) for half in match["halves"].split(";")]
        if sorted(half["letter"] or "" if half else "" for half in halves) != ["B", "F"]:
            raise ValueError("OVERLAP_F_B joins a forward and a whole backward. Maybe (0F7;7B3)OVERLAP_F_B.")
        yield from (_Action(_op(half), overlaps=True) for half in halves if half)
    elif match:
        yield _Action(_op(match) if match["letter"] else None)


def _op(match: re.Match[str]) -> Op:
    return Op(match["letter"], int(match["stage"]), int(match["microbatch"]))


def _misplaced(compute: Sequence[Sequence[Op]]) -> Iterator[Issue]:
    """Stages that stand on two ranks."""
    ranks: dict[int, set[int]] = {}
    for r, ops in enumerate(compute):
        for op in ops:
            ranks.setdefault(op.stage, set()).add(r)
    for s, found in sorted(ranks.items()):
        if len(found) > 1:
            detail = f"stage {s} is on ranks {', '.join(map(str, sorted(found)))}, but a stage is on one rank"
            yield Issue("", "two_ranks", f"{detail}. Maybe a row is of another file.")


def _incomplete(compute: Sequence[Sequence[Op]]) -> Iterator[Issue]:
    """Ops that are missing or repeated: every stage runs every microbatch forward and backward once."""
    found = Counter(op for ops in compute for op in ops)
    if not any(op.kind == "F" for op in found):
        yield Issue("", "no_forward", "has no forward (such as 0F0). Maybe this is another file.")
        return
    if all(op.kind == "F" for op in found):
        yield Issue("", "no_backward", "has forwards alone, but a training step is read. Maybe it is of an evaluation.")
        return
    stages, microbatches = 1 + max(op.stage for op in found), 1 + max(op.microbatch for op in found)
    size = f"{stages} stages and {microbatches} microbatches"
    if stages * microbatches > 2 * len(found):
        yield Issue("", "incomplete", f"has {len(found)} ops, too few for {size}. Maybe rows are missing.")
        return
    counts = {
        (s, i): [found[Op(kind, s, i)] for kind in ("F", "B", "W", "BW")]
        for s in range(stages)
        for i in range(microbatches)
    }
    wrong = [key for key, count in counts.items() if count not in ([1, 1, 1, 0], [1, 0, 0, 1])]
    for s, i in wrong[:1]:
        forward, b, w, whole = counts[s, i]
        yield Issue(
            "",
            "incomplete",
            f"has {forward} F, {b + whole} I or B and {w} W of stage {s}, microbatch {i} ({len(wrong)} of {size} are "
            "wrong), but each needs one F, and one B or one I and W. Maybe rows are missing, or there are two steps.",
        )


def _other_orders(compute: Sequence[Sequence[Op]], order: Sequence[int]) -> Iterator[Issue]:
    """Ops of a stage that run the microbatches in another order than the first stage's forwards."""
    place = {i: k for k, i in enumerate(order)}
    latest: dict[tuple[str, int], Op] = {}
    for r, ops in enumerate(compute):
        for op in ops:
            row = op.kind[0], op.stage
            before = latest.get(row, op)
            if place[op.microbatch] < place[before.microbatch]:
                detail = (
                    f"rank {r} runs {before} before {op}, but in a schedule the ops of all stages take microbatches "
                    "in one order. Maybe "
                )
                by_class = "it is of ScheduleLoopedBFS, whose backwards begin with the last microbatch."
                fix = "two cells are exchanged." if op.kind == "F" else by_class
                yield Issue("", "other_order", detail + fix)
                return
            latest[row] = op


def _uniform_problem(compute: Sequence[Sequence[Op]], source: str, microbatch_order: Sequence[int] | None) -> Problem:
    rank_of = {op.stage: r for r, ops in enumerate(compute) for op in ops}
    costs = {
        "forward_us": OP_US,
        "backward_input_us": OP_US,
        "backward_weight_us": OP_US,
        "activation_bytes": ACTIVATION_BYTES,
        "backward_weight_bytes": ACTIVATION_BYTES // 2,
    }
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "name": source.rpartition("/")[2][-MAX_NAME:],
            "microbatches": 1 + max(op.microbatch for ops in compute for op in ops),
            "devices": [{"memory_bytes": None}] * len(compute),
            "stages": [{"device": rank_of[s], **costs} for s in sorted(rank_of)],
            "source": "torch's schedule CSV, which has no costs: 1 ms for each F, B and W, 1,000 bytes an activation",
        }
        | ({} if microbatch_order is None else {"microbatch_order": "free"})
    )


def _misfits(
    compute: Sequence[Sequence[Op]], problem: Problem, microbatch_order: Sequence[int] | None
) -> Iterator[Issue]:
    """Ranks, stages, microbatches and their order that a problem has not as the file has them."""
    rank_of = {op.stage: r for r, ops in enumerate(compute) for op in ops}
    sizes = {
        "ranks": (len(compute), len(problem.devices)),
        "stages": (len(rank_of), len(problem.stages)),
        "microbatches": (1 + max(op.microbatch for ops in compute for op in ops), problem.microbatches),
    }
    for name, (own, other) in sizes.items():
        if own != other:
            yield Issue("", "other_problem", f"has {own} {name}, but the problem {other}. Maybe it is of another run.")
    same_sizes = all(own == other for own, other in sizes.values())
    for s, stage in enumerate(problem.stages if same_sizes else ()):
        if rank_of[s] != stage.device:
            detail = f"has stage {s} on rank {rank_of[s]}, but the problem on device {stage.device}"
            yield Issue("", "other_placement", f"{detail}. Maybe its placement is another one.")
    yield from _spread_passes(problem)
    if problem.slice_count > 1:
        detail = f"has whole microbatches, but the problem has slices.count {problem.slice_count}. Maybe leave it out."
        yield Issue("", "slices", detail)
    if microbatch_order is not None and problem.microbatch_order == "given":
        detail = "takes microbatches in another order than the problem, whose microbatch_order is 'given'"
        yield Issue("", "other_order", f"{detail}. Maybe make it 'free'.")
