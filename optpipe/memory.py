"""Memory effects of ops, memory over time, and the waits that bound it under any timing.

An op changes memory twice: it takes bytes at its start, and changes the level (by either sign) at its end. At one
instant ends count before starts, so that memory freed by one op is available to an op that starts at that instant.

Streams run concurrently, so behind a slow offload a forward could start before the memory that it needs is free.
Therefore every op that takes memory waits for all releases that end by its planned start. Proof that this suffices: at
any moment, under any durations, let x be the op planned last among those that have taken memory. All releases planned
before x are done, so the level is at most the planned level at x. Streams run in order, so one wait per other stream is
enough, and no wait delays an op at the planned times.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.ops import KINDS, DeviceOrders, Op, OpArray
from optpipe.problem import Problem, Stage
from optpipe.schedule import Schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Effect(NamedTuple):
    """Bytes that an op takes at its start (at least 0), and the signed change at its end."""

    at_start: int
    at_end: int

    @property
    def releases(self) -> bool:
        """True if the op frees memory at its end."""
        return self.at_end < 0

    @property
    def acquires(self) -> bool:
        """True if memory can rise while the op runs or at its end."""
        return self.at_start > 0 or self.at_start + self.at_end > 0


def device_effect(stage: Stage, kind: str) -> Effect:
    """Effect of an op of `kind` on `stage` on its device's memory."""
    held, kept = stage.activation_bytes, stage.backward_weight_bytes
    if kind in "OR":
        moved = stage.offload.bytes if stage.offload else 0
        return Effect(0, -moved) if kind == "O" else Effect(moved, 0)
    work: int = getattr(stage.workspace_bytes, kind)
    change_at_end = {"F": 0, "B": kept - held, "W": -kept, "BW": -held}[kind]
    return Effect(work + (held if kind == "F" else 0), change_at_end - work)


def host_effect(stage: Stage, kind: str) -> Effect:
    """Effect of an op on host memory: the buffer is held from the start of O to the end of R."""
    moved = stage.offload.bytes if stage.offload else 0
    return Effect(moved if kind == "O" else 0, -moved if kind == "R" else 0)


class Curve(NamedTuple):
    """A step function: the level is `bytes[k]` from `times_us[k]` until the next time; 0 before the first."""

    times_us: Floats
    bytes: Ints

    @property
    def peak_bytes(self) -> int:
        """Largest level; 0 for an empty curve."""
        return int(self.bytes.max(initial=0))


def effect_table(problem: Problem, effect: Callable[[Stage, str], Effect]) -> Ints:
    """Effects of every kind of op on every stage: an array (kinds, stages, 2) of bytes at start and end."""
    return np.array([[effect(stage, kind) for stage in problem.stages] for kind in KINDS], np.int64)


def curve(events: Iterable[tuple[float, float, Effect]]) -> Curve:
    """Memory curve of ops given as (start_us, end_us, effect)."""
    columns = tuple(zip(*events, strict=True))
    if not columns:
        return Curve(np.zeros(1), np.zeros(1, np.int64))
    start_us, end_us, effects = columns
    return memory_curve(np.asarray(start_us, np.float64), np.asarray(end_us, np.float64), np.asarray(effects, np.int64))


def memory_curve(start_us: Floats, end_us: Floats, effects: Ints) -> Curve:
    """Memory curve of ops with these starts, ends, and effects of shape (ops, 2)."""
    if not len(start_us):
        return Curve(np.zeros(1), np.zeros(1, np.int64))
    times = np.concatenate([end_us, start_us])
    order = np.argsort(times, kind="stable")
    at = times[order]
    levels = np.cumsum(np.concatenate([effects[:, 1], effects[:, 0]])[order])
    last_of_instant = np.append(at[1:] != at[:-1], True)
    return Curve(at[last_of_instant], levels[last_of_instant])


def planned_memory(schedule: Schedule, device: int) -> Curve:
    """Memory curve of a device at its predicted times; its peak is the device's `peak_bytes`."""
    table = effect_table(schedule.problem, device_effect)
    streams = [ops for _, ops in schedule.devices[device].streams()]
    ops = OpArray.joined([stream.ops for stream in streams])
    start_us = np.concatenate([stream.start_us for stream in streams])
    end_us = np.concatenate([stream.end_us for stream in streams])
    return memory_curve(start_us, end_us, table[ops.kind, ops.stage])


Times = Mapping[Op, tuple[float, float]]
"""Planned start and end of each op, in any common unit."""

Effects = Mapping[tuple[int, str], Effect]
"""Effect of an op by stage and kind."""


def derive_waits(
    problem: Problem, devices: Sequence[DeviceOrders], planned: Times, tolerance: float = 0.0
) -> dict[Op, list[Op]]:
    """Derive the waits that keep the planned memory peak under any timing.

    `planned` holds the start and end of every op; a release counts as ended if it ends at most `tolerance` after a
    start. Returns for each op the ops of other streams to wait for, without waits that earlier ones imply.
    """
    waits: dict[Op, list[Op]] = defaultdict(list)
    on_device, on_host = _table(problem, device_effect), _table(problem, host_effect)
    for device in devices:
        if not device.offload:
            continue
        for acquirers, releasers in (
            (device.compute, device.offload),
            (device.reload, device.offload),
            (device.reload, device.compute),
        ):
            _add(waits, on_device, acquirers, releasers, planned, tolerance)
        if problem.host_memory_bytes is not None:
            _add(waits, on_host, device.offload, device.reload, planned, tolerance)
    return dict(waits)


def planned_order(ops: Iterable[Op], planned: Times) -> list[Op]:
    """Ops of one stream by planned times, ties by microbatch."""
    return sorted(ops, key=lambda op: (*planned[op], op.microbatch))


def _add(
    waits: dict[Op, list[Op]],
    effects: Effects,
    acquirers: Sequence[Op],
    releasers: Sequence[Op],
    planned: Times,
    tolerance: float,
) -> None:
    """Let each acquiring op of one stream wait for the last release of another stream planned before it."""
    releases = [op for op in releasers if effects[op.stage, op.kind].releases]
    ends = [planned[op][1] for op in releases]
    waited = 0
    for op in acquirers:
        if not effects[op.stage, op.kind].acquires:
            continue
        done = bisect_right(ends, planned[op][0] + tolerance)
        while done > waited and _instant(planned[op]) and _instant(planned[releases[done - 1]]):
            done -= 1  # two zero-length ops at one instant could otherwise wait for each other
        if done > waited:
            waits[op].append(releases[done - 1])
            waited = done


def _instant(times: tuple[float, float]) -> bool:
    return times[0] == times[1]


def _table(problem: Problem, effect: Callable[[Stage, str], Effect]) -> Effects:
    return {(s, kind): effect(stage, kind) for s, stage in enumerate(problem.stages) for kind in KINDS}
