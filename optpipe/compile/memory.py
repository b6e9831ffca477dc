"""The memory that a program needs with given sizes: the plan that a measured run is held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from optpipe.compile.actions import RECEIVES, SENDS, Program
from optpipe.memory import device_effect
from optpipe.orders import Op
from optpipe.problem import Problem


def planned_peaks_bytes(program: Program, problem: Problem, message_bytes: Sequence[int]) -> list[int]:
    """Peak of each device's memory when it runs its list, one action at a time.

    `problem` holds the sizes of its stages (contract: activation, backward weight, workspace, offload), and
    `message_bytes[b]` the size of what crosses the boundary between stages b and b+1, each way. A message counts on
    its receiver from the receive until the op that uses it begins, and on its sender from the end of the op that made
    it until it is sent.
    """
    return [_peak(_changes(program, d, problem, message_bytes)) for d in range(len(program.devices))]


def _peak(changes: Iterator[int]) -> int:
    level = peak = 0
    for change in changes:
        level += change
        peak = max(peak, level)
    return peak


def _changes(program: Program, device: int, problem: Problem, message_bytes: Sequence[int]) -> Iterator[int]:
    """Changes of the level in list order."""
    for action in program.devices[device]:
        if action.kind in SENDS:
            yield -message_bytes[action.message.boundary]
        elif action.kind in RECEIVES:
            yield message_bytes[action.message.boundary]
        else:
            used, made = _messages(action.key, message_bytes)
            effect = device_effect(problem.stages[action.stage], action.kind)
            yield effect.at_start - used
            yield effect.at_end + made


def _messages(op: Op, message_bytes: Sequence[int]) -> tuple[int, int]:
    """Bytes of the message that an op uses, and of the one that it makes."""
    before = message_bytes[op.stage - 1] if op.stage > 0 else 0
    after = message_bytes[op.stage] if op.stage < len(message_bytes) else 0
    if op.kind == "F":
        return before, after
    return (after, before) if op.kind in ("B", "BW") else (0, 0)
