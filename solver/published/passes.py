"""Placement requirements of published schedules, and orders that take turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optpipe.errors import MethodError
from optpipe.kinds import KINDS
from optpipe.ops import OpArray
from optpipe.problem import Problem


def general_methods(problem: Problem) -> str:
    """Methods that take any placement and offload, as an error names them: such as are right for `problem`."""
    if (
        problem.spread
        or problem.slice_count > 1
        or any(stage.modes or not stage.split_backward for stage in problem.stages)
    ):
        return "auto or cp-sat"
    return "ada-offload or an exact method"


def require_one_stage_a_device(problem: Problem, method: str) -> None:
    """Raise MethodError unless every device holds exactly one stage (in whichever order)."""
    for d, stages in enumerate(problem.stages_of):
        if len(stages) != 1:
            raise MethodError(
                f"{method} places one stage on each device, but device {d} has {len(stages)}. "
                f"Maybe use {general_methods(problem)}, which take any placement."
            )


def require_interleaved(problem: Problem, method: str) -> int:
    """The chunks of a device; raises MethodError unless stage s sits on device s mod d and there are two or more."""
    d, stages = len(problem.devices), problem.stages
    for s, stage in enumerate(stages):
        if stage.device != s % d:
            raise MethodError(
                f"{method} needs interleaved placement: stages[{s}].device is {stage.device}, but {s} mod {d} devices "
                f"is {s % d}. Maybe use {general_methods(problem)}, which take any placement."
            )
    if len(stages) % d or len(stages) < 2 * d:
        raise MethodError(
            f"{method} needs the same number of stages on each device, at least 2, but {len(stages)} stages on {d} "
            f"devices are {len(stages) / d:g}. Maybe split the model into {2 * d} stages."
        )
    return len(stages) // d


def require_v_shape(problem: Problem, method: str) -> None:
    """Raise MethodError unless the stages go along the devices and back, two on each."""
    p, stages = len(problem.devices), problem.stages
    along_v = [*range(p), *reversed(range(p))]
    if len(stages) != 2 * p:
        raise MethodError(
            f"{method} places 2 stages on each of {p} devices, from device 0 to {p - 1} and back, but there are "
            f"{len(stages)} stages. Maybe use {general_methods(problem)}, which take any placement."
        )
    for s, (stage, device) in enumerate(zip(stages, along_v, strict=True)):
        if stage.device != device:
            raise MethodError(
                f"{method} places stages from device 0 to {p - 1} and back, but stages[{s}].device is {stage.device} "
                f"and not {device}. Maybe use {general_methods(problem)}, which take any placement."
            )


def in_turn(stage: int, microbatches: int, kinds: Sequence[tuple[str, int]]) -> OpArray:
    """All ops of these kinds on a stage, turn by turn.

    `kinds` are in the order that they have within a turn, each with the turn of its first microbatch; the next ones
    follow turn by turn. Kinds that begin in turns below 0 are the warm-up.
    """
    microbatch = np.tile(np.arange(microbatches), len(kinds))
    rank = np.repeat(np.arange(len(kinds)), microbatches)
    turn = microbatch + np.array([first for _, first in kinds])[rank]
    order = np.lexsort((rank, turn))
    code = np.array([KINDS.index(kind) for kind, _ in kinds])[rank]
    return OpArray(code[order], np.full(len(order), stage), microbatch[order])
