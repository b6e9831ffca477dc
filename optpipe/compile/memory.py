"""The memory that a program needs with given sizes: the plan that a measured run is held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optpipe.compile.program import RECEIVES, SENDS, Action, Program
from optpipe.errors import BudgetError
from optpipe.memory import Effect, device_effect, host_effect
from optpipe.ops import Op
from optpipe.problem import Problem, Stage

NOTHING = Effect(0, 0)


def planned_peaks_bytes(program: Program, problem: Problem, message_bytes: Sequence[int]) -> list[int]:
    """Peak of each device's memory when it runs its list, one action at a time.

    Since memory is taken and given back on the compute stream alone, several streams reach no other level. `problem`
    holds the sizes of its stages (contract: activation, backward weight, workspace, offload), and `message_bytes[b]`
    the size of what crosses the boundary between stages b and b+1, each way. A message counts on its receiver from
    the receive until the op that uses it begins, and on its sender from the end of the op that made it until it is
    sent. An activation that leaves counts until RELEASE, and from PREPARE on.
    """
    return [
        max((level for _, level in _levels(actions, problem, message_bytes)), default=0) for actions in program.devices
    ]


@dataclass(frozen=True)
class PlannedMemory:
    """What a device may hold: `peak_bytes` by the plan, and `budget_bytes`, None without one.

    A budget is for activations and workspaces; here it has the room of the messages that the plan has beside them.
    """

    peak_bytes: int
    budget_bytes: int | None

    def excess(self, device: int, measured_bytes: int, margin: float = 0.0) -> str | None:
        """A sentence about a peak above plan or budget; None where it is within both.

        `margin` is the share of its memory that a device had left free for that: so far a peak may go above them.
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


def planned_memory(program: Program, problem: Problem, message_bytes: Sequence[int]) -> list[PlannedMemory]:
    """For each device, its peak (`planned_peaks_bytes`) and its budget in `problem`."""
    peaks = planned_peaks_bytes(program, problem, message_bytes)
    alone = planned_peaks_bytes(program, problem, [0] * len(message_bytes))
    budgets = [device.memory_bytes for device in problem.devices]
    return [
        PlannedMemory(peak, None if budget is None else budget + peak - without)
        for peak, without, budget in zip(peaks, alone, budgets, strict=True)
    ]


def check_memory(program: Program, problem: Problem) -> None:
    """Raise BudgetError at the first action with which a device holds more than its `memory_bytes`.

    As in the contract, budgets are for activations and workspaces; messages count nothing.
    """
    nothing = [0] * (len(problem.stages) - 1)
    for d, (device, actions) in enumerate(zip(problem.devices, program.devices, strict=True)):
        if device.memory_bytes is None:
            continue
        for action, level in _levels(actions, problem, nothing):
            if level > device.memory_bytes:
                raise BudgetError(
                    f"device {d} holds {level} bytes at {action}, but its memory_bytes is {device.memory_bytes}. "
                    "Maybe the schedule was made for other budgets, or lacks waits for its offloads: run "
                    "'optpipe verify' on it."
                )


def action_effect(stage: Stage, kind: str) -> Effect:
    """What an action does to the memory of its device, messages aside."""
    if kind in ("F", "B", "W", "BW"):
        return device_effect(stage, kind)
    return device_effect(stage, {"RELEASE": "O", "PREPARE": "R"}[kind]) if kind in ("RELEASE", "PREPARE") else NOTHING


def host_bytes(problem: Problem, stage: int) -> int:
    """What one offloaded activation of a stage takes on the host."""
    return host_effect(problem.stages[stage], "O").at_start


def _levels(actions: Sequence[Action], problem: Problem, message_bytes: Sequence[int]) -> Iterator[tuple[Action, int]]:
    """Every level of a device's memory, with the action that brings it."""
    effects = {(s, kind): action_effect(stage, kind) for s, stage in enumerate(problem.stages) for kind in _KINDS}
    level = 0
    for action in actions:
        for change in _changes(action, effects.get((action.stage, action.kind), NOTHING), message_bytes):
            level += change
            yield action, level


_KINDS = ("F", "B", "W", "BW", "RELEASE", "PREPARE")


def _changes(action: Action, effect: Effect, message_bytes: Sequence[int]) -> Iterator[int]:
    if action.kind in SENDS:
        yield -message_bytes[action.message.boundary]
    elif action.kind in RECEIVES:
        yield message_bytes[action.message.boundary]
    else:
        used, made = _messages(action.key, message_bytes)
        yield effect.at_start - used
        yield effect.at_end + made


def _messages(op: Op, message_bytes: Sequence[int]) -> tuple[int, int]:
    """Bytes of the message that an op uses, and of the one that it makes."""
    before = message_bytes[op.stage - 1] if op.stage > 0 else 0
    after = message_bytes[op.stage] if op.stage < len(message_bytes) else 0
    if op.kind == "F":
        return before, after
    return (after, before) if op.kind in ("B", "BW") else (0, 0)
