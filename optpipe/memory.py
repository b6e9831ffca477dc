"""What each op takes and frees, and the memory of a device over time.

An op changes memory twice: it takes bytes at its start, and changes the level (by either sign) at its end. At one
instant ends count before starts, so that a release serves the op that begins when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.problem import Stage
from optpipe.schedule import Schedule


class Effect(NamedTuple):
    """Bytes taken at an op's start (at least 0) and the signed change at its end."""

    at_start: int
    at_end: int

    @property
    def releases(self) -> bool:
        """Whether the op frees anything at its end."""
        return self.at_end < 0

    @property
    def acquires(self) -> bool:
        """Whether memory can rise while the op runs or at its end."""
        return self.at_start > 0 or self.at_start + self.at_end > 0


def device_effect(stage: Stage, kind: str) -> Effect:
    """What an op of `kind` on `stage` does to its device's memory."""
    held, kept = stage.activation_bytes, stage.backward_weight_bytes
    if kind in "OR":
        moved = stage.offload.bytes if stage.offload else 0
        return Effect(0, -moved) if kind == "O" else Effect(moved, 0)
    work: int = getattr(stage.workspace_bytes, kind)
    change_at_end = {"F": 0, "B": kept - held, "W": -kept, "BW": -held}[kind]
    return Effect(work + (held if kind == "F" else 0), change_at_end - work)


def host_effect(stage: Stage, kind: str) -> Effect:
    """What an op does to the host's memory: the buffer is held from O's start to R's end, both copies included."""
    moved = stage.offload.bytes if stage.offload else 0
    return Effect(moved if kind == "O" else 0, -moved if kind == "R" else 0)


class Curve(NamedTuple):
    """A step function: the level is `bytes[k]` from `times_us[k]` until the next time; 0 before the first."""

    times_us: NDArray[np.float64]
    bytes: NDArray[np.int64]

    @property
    def peak_bytes(self) -> int:
        return int(self.bytes.max(initial=0))


def curve(events: Iterable[tuple[float, float, Effect]]) -> Curve:
    """The memory curve of ops given as (start_us, end_us, effect)."""
    times: list[float] = []
    rank: list[int] = []
    deltas: list[int] = []
    for start, end, effect in events:
        times += (start, end)
        rank += (1, 0)
        deltas += effect
    if not times:
        return Curve(np.zeros(1), np.zeros(1, np.int64))
    order = np.lexsort((rank, times))
    at = np.asarray(times, np.float64)[order]
    levels = np.cumsum(np.asarray(deltas, np.int64)[order])
    last_of_instant = np.append(at[1:] != at[:-1], True)
    return Curve(at[last_of_instant], levels[last_of_instant])


def planned_memory(schedule: Schedule, device: int) -> Curve:
    """The memory curve of one device of a schedule at its predicted times; its peak is the device's `peak_bytes`."""
    stages = schedule.problem.stages
    return curve(
        (op.start_us, op.end_us, device_effect(stages[op.stage], op.op))
        for _, ops in schedule.devices[device].streams()
        for op in ops
    )
