"""What each op takes and frees, and the memory of a device over time.

An op changes memory twice: it takes bytes at its start, and changes the level (by either sign) at its end. At one
instant ends count before starts, so that a release serves the op that begins when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.orders import KINDS, OpArray
from optpipe.problem import Problem, Stage
from optpipe.schedule import Schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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

    times_us: Floats
    bytes: Ints

    @property
    def peak_bytes(self) -> int:
        """The most that is in use at any time; 0 where there is nothing."""
        return int(self.bytes.max(initial=0))


def effect_table(problem: Problem, effect: Callable[[Stage, str], Effect]) -> Ints:
    """What every kind of op does on every stage: an array (kinds, stages, 2) of the bytes of each Effect."""
    return np.array([[effect(stage, kind) for stage in problem.stages] for kind in KINDS], np.int64)


def curve(events: Iterable[tuple[float, float, Effect]]) -> Curve:
    """The memory curve of ops given as (start_us, end_us, effect)."""
    columns = tuple(zip(*events, strict=True))
    if not columns:
        return Curve(np.zeros(1), np.zeros(1, np.int64))
    start_us, end_us, effects = columns
    return curve_of(np.asarray(start_us, np.float64), np.asarray(end_us, np.float64), np.asarray(effects, np.int64))


def curve_of(start_us: Floats, end_us: Floats, effects: Ints) -> Curve:
    """The memory curve of ops with these starts, ends, and effects of shape (ops, 2)."""
    if not len(start_us):
        return Curve(np.zeros(1), np.zeros(1, np.int64))
    times = np.concatenate([end_us, start_us])
    order = np.argsort(times, kind="stable")
    at = times[order]
    levels = np.cumsum(np.concatenate([effects[:, 1], effects[:, 0]])[order])
    last_of_instant = np.append(at[1:] != at[:-1], True)
    return Curve(at[last_of_instant], levels[last_of_instant])


def planned_memory(schedule: Schedule, device: int) -> Curve:
    """The memory curve of one device of a schedule at its predicted times; its peak is the device's `peak_bytes`."""
    table = effect_table(schedule.problem, device_effect)
    streams = [ops for _, ops in schedule.devices[device].streams()]
    ops = OpArray.joined([stream.ops for stream in streams])
    start_us = np.concatenate([stream.start_us for stream in streams])
    end_us = np.concatenate([stream.end_us for stream in streams])
    return curve_of(start_us, end_us, table[ops.kind, ops.stage])
