"""Memory over time, and the waits that bound it under any timing.

An op changes memory twice (`optpipe.costs`): it takes bytes at its start, and changes the level (by either sign) at its
end. At one instant ends count before starts, so that memory freed by one op is available to an op that starts at that
instant.

Streams run concurrently, so behind a slow offload a forward could start before the memory that it needs is free.
Therefore every op that takes memory waits for all releases that end by its planned start. Proof that this suffices: at
any moment, under any durations, let x be the op planned last among those that have taken memory. All releases planned
before x are done, so the level is at most the planned level at x. Streams run in order, so one wait per other stream is
enough, and no wait delays an op at the planned times.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.costs import Effect
from optpipe.ops import DeviceOrders, Op, OpArray
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.task_graph import lower

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Curve(NamedTuple):
    """A step function: the level is `bytes[k]` from `times_us[k]` until the next time; 0 before the first."""

    times_us: Floats
    bytes: Ints

    @property
    def peak_bytes(self) -> int:
        """Largest level; 0 for an empty curve."""
        return int(self.bytes.max(initial=0))


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
    streams = [ops for _, ops in schedule.devices[device].streams()]
    ops = OpArray.joined([stream.ops for stream in streams])
    start_us = np.concatenate([stream.start_us for stream in streams])
    end_us = np.concatenate([stream.end_us for stream in streams])
    graph = lower(schedule.problem)
    return memory_curve(start_us, end_us, graph.device_bytes[graph.types(ops, schedule.modes)])


Times = Mapping[Op, tuple[float, float]]
"""Planned start and end of each op, in any common unit."""


def derive_waits(
    problem: Problem,
    devices: Sequence[DeviceOrders],
    planned: Times,
    tolerance: float = 0.0,
    modes: Ints | None = None,
) -> dict[Op, list[Op]]:
    """Derive the waits that keep the planned memory peak under any timing.

    `planned` holds the start and end of every op; a release counts as ended if it ends at most `tolerance` after a
    start. `modes` are those of `Orders`. Returns for each op the ops of other streams to wait for, without waits that
    earlier ones imply.
    """
    waits: dict[Op, list[Op]] = defaultdict(list)
    graph = lower(problem)
    for device in devices:
        if not device.offload:
            continue
        streams = [OpArray.of(stream) for stream in device.streams()]
        types = [graph.types(ops, modes) for ops in streams]
        compute, offload, reload = ((ops, graph.device_bytes[own]) for ops, own in zip(streams, types, strict=True))
        for acquirers, releasers in ((compute, offload), (reload, offload), (reload, compute)):
            _add(waits, acquirers, releasers, planned, tolerance)
        if problem.host_memory_bytes is not None:
            offload, reload = ((ops, graph.host_bytes[own]) for ops, own in zip(streams[1:], types[1:], strict=True))
            _add(waits, offload, reload, planned, tolerance)
    return dict(waits)


def _add(
    waits: dict[Op, list[Op]],
    acquirers: tuple[OpArray, Ints],
    releasers: tuple[OpArray, Ints],
    planned: Times,
    tolerance: float,
) -> None:
    """Let each acquiring op of one stream wait for the last release of another stream planned before it.

    Streams are given with the effects of their ops, of shape (ops, 2).
    """
    ops, effects = acquirers
    acquiring = ops[np.flatnonzero((effects[:, 0] > 0) | (effects.sum(axis=1) > 0))]
    ops, effects = releasers
    releases = ops[np.flatnonzero(effects[:, 1] < 0)]
    ends = [planned[op][1] for op in releases]
    waited = 0
    for op in acquiring:
        done = bisect_right(ends, planned[op][0] + tolerance)
        while done > waited and _instant(planned[op]) and _instant(planned[releases[done - 1]]):
            done -= 1  # two zero-length ops at one instant could otherwise wait for each other
        if done > waited:
            waits[op].append(releases[done - 1])
            waited = done


def _instant(times: tuple[float, float]) -> bool:
    return times[0] == times[1]
