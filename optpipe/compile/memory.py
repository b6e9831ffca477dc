"""Planned memory of a program for given sizes, against which a measured run is compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

import numpy as np

from optpipe.assignment import MemorySteps
from optpipe.compile.program import COLLECTIVES, EXCHANGES, RECEIVES, SENDS, Action, Program
from optpipe.costs import Effect, device_effect, implied_mode, sizes_bytes
from optpipe.errors import BudgetError
from optpipe.kinds import BACKWARDS, COPIES, KINDS, LAST_BACKWARDS
from optpipe.ops import Op
from optpipe.problem import Problem
from optpipe.spread import SpreadPass
from optpipe.stage import Mode, Stage, scaled_bytes

NOTHING = Effect(0, 0)

MessageBytes = Sequence[int | Sequence[int]]
"""Size of the message over each boundary in each direction: one number, or one for each unit."""


@dataclass(frozen=True)
class ReplicaMemory:
    """Bytes that a stage holds in addition to activations because its replicas share out parameters and gradients.

    `gathered_bytes` from GATHER to REDUCE; `gradient_bytes` from the first weight gradient to REDUCE, or to the next
    REDUCE_PART; `reduced_bytes` from a reduction to the end of the step. Workspaces: beyond that, while one runs.
    """

    gathered_bytes: int = 0
    gather_workspace_bytes: int = 0
    gradient_bytes: int = 0
    reduced_bytes: int = 0
    reduce_workspace_bytes: int = 0


def planned_peaks_bytes(
    program: Program,
    problem: Problem,
    message_bytes: MessageBytes,
    replicas: Sequence[ReplicaMemory] | None = None,
    *,
    of_units: Sequence[Sequence[Stage]] | None = None,
) -> list[int]:
    """Peak memory of each device when it runs its list, one action at a time.

    Memory is allocated and freed on the compute stream only, so concurrent streams reach no other level. `problem`
    holds the sizes of its stages (activation, backward weight, workspace, offload) and units, `message_bytes[b]` the
    size of a message over the boundary between stages b and b+1 in each direction, and behind the last stage where a
    vocabulary layer follows it. A message counts on its receiver
    from the receive until the op that uses it starts, and on its sender from the end of the op that made it until it is
    sent. Both ops of a block run at once. An offloaded activation counts until RELEASE, and again from PREPARE.
    `replicas`: of each stage, if it has any. `of_units`: for each unit the stages with its sizes, where these were
    measured.
    """
    of_stages = replicas or [ReplicaMemory()] * len(problem.stages)
    sizes = _UnitSizes.planned(problem) if of_units is None else _UnitSizes.measured(of_units, problem)
    return [
        max((level for _, level in _levels(program, d, sizes, message_bytes, of_stages)), default=0)
        for d in range(len(program.devices))
    ]


@dataclass(frozen=True)
class PlannedMemory:
    """Planned peak and budget of a device; no budget: None.

    The budget of a problem is for activations and workspaces; `budget_bytes` also includes the planned messages.
    """

    peak_bytes: int
    budget_bytes: int | None

    def excess(self, device: int, measured_bytes: int, margin: float = 0.0) -> str | None:
        """Describe a measured peak above plan or budget; None if it is within both.

        `margin` is the share of device memory left free for such an excess.
        """
        limits = [self.peak_bytes] if self.budget_bytes is None else [self.peak_bytes, self.budget_bytes]
        if measured_bytes * (1 - margin) <= min(limits):
            return None
        budget = "" if self.budget_bytes is None else f" and its budget is {self.budget_bytes:,} with its messages"
        return (
            f"device {device} held {measured_bytes:,} bytes at its peak, but {self.peak_bytes:,} are planned{budget}: "
            f"{measured_bytes - min(limits):,} too many. Maybe its sizes depend on the data: profile with more of it "
            "(--data), and leave room with --memory-margin."
        )


def planned_memory(program: Program, problem: Problem, message_bytes: MessageBytes) -> list[PlannedMemory]:
    """Planned peak (`planned_peaks_bytes`) and budget of each device."""
    peaks = planned_peaks_bytes(program, problem, message_bytes)
    alone = planned_peaks_bytes(program, problem, [0] * len(message_bytes))
    budgets = [device.memory_bytes for device in problem.devices]
    return [
        PlannedMemory(peak, None if budget is None else budget + peak - without)
        for peak, without, budget in zip(peaks, alone, budgets, strict=True)
    ]


def memory_steps(program: Program, problem: Problem) -> list[MemorySteps]:
    """Changes of memory of each device that has a budget, without messages, by the costs that stages state."""
    no_messages, sizes = (
        [0] * (len(problem.stages) - 1),
        _UnitSizes([[s] for s in problem.stages], [0] * problem.units, _pass_effects(problem, [Fraction(1)])),
    )
    steps = []
    for d, device in enumerate(problem.devices):
        if device.memory_bytes is not None:
            levels = list(_levels(program, d, sizes, no_messages, [ReplicaMemory()] * len(problem.stages)))
            units = np.array([action.microbatch for action, _ in levels], np.int64)
            changes = np.diff([0, *(level for _, level in levels)]).astype(np.int64)
            steps.append(MemorySteps(units, changes, device.memory_bytes))
    return steps


def check_memory(program: Program, problem: Problem) -> None:
    """Raise BudgetError at the first action with which a device holds more than its `memory_bytes`.

    Budgets are for activations and workspaces; messages do not count.
    """
    no_messages, sizes = [0] * (len(problem.stages) - 1), _UnitSizes.planned(problem)
    for d, device in enumerate(problem.devices):
        if device.memory_bytes is None:
            continue
        for action, level in _levels(program, d, sizes, no_messages, [ReplicaMemory()] * len(problem.stages)):
            if level > device.memory_bytes:
                raise BudgetError(
                    f"device {d} holds {level} bytes at {action}, but its memory_bytes is {device.memory_bytes}. "
                    "Maybe the schedule was made for other budgets, or lacks waits for its offloads: run "
                    "'optpipe verify' on it."
                )


_COPY_OF = {"RELEASE": "O", "PREPARE": "R"}
"""The op whose effect on device memory an action of an offload has; O and R themselves have none."""


@dataclass(frozen=True)
class _UnitSizes:
    """Stages with the sizes of each unit, `stages[s][unit_class[i]]`, and passes: `passes[name][d][unit_class[i]]`."""

    stages: Sequence[Sequence[Stage]]
    unit_class: Sequence[int]
    passes: Mapping[str, Sequence[Sequence[Effect]]] = field(default_factory=dict)

    @classmethod
    def planned(cls, problem: Problem) -> _UnitSizes:
        """Sizes of a problem, times its factors."""
        factors = [problem.pass_factors(unit).bytes for unit in problem.class_units]
        return cls(problem.unit_stages, problem.unit_class.tolist(), _pass_effects(problem, factors))

    @classmethod
    def measured(cls, of_units: Sequence[Sequence[Stage]], problem: Problem) -> _UnitSizes:
        """Sizes of the stages for each unit; alike units have one list. Those of passes are the problem's."""
        different = list({id(stages): stages for stages in of_units}.values())
        numbers = {id(stages): number for number, stages in enumerate(different)}
        stages = [list(column) for column in zip(*different, strict=True)]
        passes = _pass_effects(problem, [Fraction(1)] * len(different))
        return cls(stages, [numbers[id(stages)] for stages in of_units], passes)


def _pass_effects(problem: Problem, factors: Sequence[Fraction]) -> dict[str, list[list[Effect]]]:
    """Effects of the ops of each spread pass on each device, times each of the factors."""
    passes = {one.name: one for one in problem.spread or ()}

    def effect(one: SpreadPass, device: int, factor: Fraction) -> Effect:
        kept, workspace = scaled_bytes(one.kept(device), factor), scaled_bytes(one.workspace(device), factor)
        freed = scaled_bytes(passes[one.frees].kept(device), factor) if one.frees else 0
        return Effect(kept + workspace, -workspace - freed)

    devices = range(len(problem.devices))
    return {name: [[effect(one, d, factor) for factor in factors] for d in devices] for name, one in passes.items()}


def unit_stage(program: Program, problem: Problem, stage: int, unit: int) -> tuple[Stage, Mode | None]:
    """A stage with the costs of a unit, and the unit's mode there: None if it is kept, or offloaded whole."""
    own = problem.stage_of(stage, unit)
    return own, _named_mode(own, program.modes.get((stage, unit)))


def _named_mode(stage: Stage, name: str | None) -> Mode | None:
    return None if name is None else stage.choices[stage.choice_numbers[name]]


def action_effect(stage: Stage, kind: str, mode: Mode | None = None) -> Effect:
    """Effect of an action on device memory, without messages, for a microbatch in `mode` (as `unit_stage`)."""
    if kind in _COPY_OF:
        return device_effect(stage, _COPY_OF[kind], mode)
    return device_effect(stage, kind, mode) if kind in KINDS and kind not in COPIES else NOTHING


def host_bytes(stage: Stage, mode: Mode | None = None) -> int:
    """Host memory of what an offload of a microbatch in `mode` (as `unit_stage`) moves."""
    return sizes_bytes(stage, mode or implied_mode(stage, "O"))["copied"]


def _levels(
    program: Program,
    device: int,
    sizes: _UnitSizes,
    message_bytes: MessageBytes,
    replicas: Sequence[ReplicaMemory],
) -> Iterator[tuple[Action, int]]:
    """Successive memory levels of a device, each with the action that causes it."""
    with_gradients: set[int] = set()
    reduced: set[int] = set()

    @cache
    def effect_of(stage: int, unit_class: int, kind: str, mode: str | None) -> Effect:
        own = sizes.stages[stage][unit_class]
        return action_effect(own, kind, _named_mode(own, mode))

    def message(boundary: int, unit: int) -> int:
        if not 0 <= boundary < len(message_bytes):
            return 0
        of_boundary = message_bytes[boundary]
        return of_boundary if isinstance(of_boundary, int) else of_boundary[unit]

    level, last, of_blocks = 0, len(program.placement) - 1, dict[Op, int]()
    logits, weights, barriers = program.vocabulary or (None, None, 1)
    for action in program.devices[device]:
        stage, kind = action.stage, action.kind
        if kind in SENDS:
            level -= message(action.message.boundary, action.microbatch)
            yield action, level
        elif kind in RECEIVES:
            level += message(action.message.boundary, action.microbatch)
            yield action, level
        elif kind in EXCHANGES or kind in (logits, weights):
            own, home = message(last, action.microbatch), program.placement[last] == device
            if kind in (logits, weights):
                effect = sizes.passes[kind][device][sizes.unit_class[action.microbatch]]
                level += effect.at_start - (own if kind == logits else 0)
                yield action, level
                level += effect.at_end + (own if kind == (weights if barriers == 2 else logits) else 0)
            elif kind == "BROADCAST":
                level += 0 if home else own
            elif kind == "REDUCE_INPUT":
                level -= 0 if home else own  # an addend becomes the sum on the last stage's device, and leaves others
            yield action, level
        elif kind in COLLECTIVES:
            replica = replicas[stage]
            if kind == "GATHER":
                taken, kept = replica.gathered_bytes + replica.gather_workspace_bytes, replica.gathered_bytes
            else:
                taken = replica.reduce_workspace_bytes
                kept = (replica.reduced_bytes if stage not in reduced else 0) - replica.gradient_bytes
                kept -= replica.gathered_bytes if kind == "REDUCE" else 0
                reduced.add(stage)
                with_gradients.discard(stage)
            yield action, level + taken
            level += kept
            yield action, level
        else:
            if kind in LAST_BACKWARDS and stage not in with_gradients:
                with_gradients.add(stage)
                level += replicas[stage].gradient_bytes
            unit = action.microbatch
            effect = effect_of(stage, sizes.unit_class[unit], kind, program.modes.get((stage, unit)))
            previous, following = message(stage - 1, unit), message(stage, unit)
            used, made = (0, 0)
            if kind == "F":
                used, made = previous, following
            elif kind in BACKWARDS:
                used, made = following, previous if stage > program.first_trained else 0
            at_end = effect.at_end + made
            if action.key in program.blocks:  # both ops hold what they need for a moment at once
                of_blocks[program.blocks[action.key]], at_end = at_end, 0
            at_end += of_blocks.pop(action.key, 0)
            for change in (effect.at_start - used, at_end):
                level += change
                yield action, level
