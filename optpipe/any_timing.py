"""The largest memory that a device can reach under any durations that keep order and waits.

What has happened on a device at some moment is a set of events (starts and ends of ops) that contains, with each
event, everything that must come before it; and every such set can happen, since durations are free. So the peak is
the largest weight of a closed set: a maximum closure. A device runs three streams, each in order, so a closed set
is three prefixes, and dependencies through other devices add nothing (they leave and reach the compute stream, which
is totally ordered). Offloads only free memory, hence for given prefixes of compute and reload the least prefix of
offloads that these require is best, and the closure is found by a scan instead of a minimum cut.

This module is the verifier's own: it shares nothing with the simulator or the solvers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from optpipe.errors import DeadlockError
from optpipe.orders import Op
from optpipe.problem import Problem, Stage

Ints = NDArray[np.int64]

Streams = tuple[Sequence[Op], Sequence[Op], Sequence[Op]]
"""Compute, offload and reload of one device, in order."""

Waits = Mapping[Op, Sequence[Op]]


def any_timing_peak_bytes(problem: Problem, streams: Streams, waits: Waits) -> int:
    """The largest activation memory of a device over every choice of durations.

    Raises DeadlockError if the streams' orders and waits contradict one another on this device.
    """
    compute, offload, reload = (_levels(problem, ops) for ops in streams)
    if not streams[1] and not streams[2]:
        return int(compute.max())
    of_compute, _, of_reload = _required_prefixes(streams, waits)
    most_reloads = np.searchsorted(of_reload[1:, 0], np.arange(len(compute)), side="right")
    peak = 0
    for done, (_, least_offloads, least_reloads) in enumerate(of_compute):
        reloads = np.arange(least_reloads, most_reloads[done] + 1)
        offloads = np.maximum(least_offloads, of_reload[reloads, 1])
        peak = max(peak, int((compute[done] + offload[offloads] + reload[reloads]).max()))
    return peak


def _levels(problem: Problem, ops: Sequence[Op]) -> Ints:
    """Memory after each prefix of a stream's events (start, end, start, end, ...), all else left aside."""
    changes = {(s, kind): _changes(stage, kind) for s, stage in enumerate(problem.stages) for kind in _KINDS}
    deltas = [delta for op in ops for delta in changes[op.stage, op.kind]]
    return np.concatenate([[0], np.cumsum(np.asarray(deltas, np.int64))])


_KINDS = ("F", "B", "W", "BW", "O", "R")


def _changes(stage: Stage, kind: str) -> tuple[int, int]:
    """Bytes that an op of a stage adds at its start and at its end by the contract."""
    moved = stage.offload.bytes if stage.offload else 0
    if kind == "O":
        return 0, -moved
    if kind == "R":
        return moved, 0
    work: int = getattr(stage.workspace_bytes, kind)
    if kind == "F":
        return work + stage.activation_bytes, -work
    freed = {
        "B": stage.activation_bytes - stage.backward_weight_bytes,
        "W": stage.backward_weight_bytes,
        "BW": stage.activation_bytes,
    }
    return work, -work - freed[kind]


def _required_prefixes(streams: Streams, waits: Waits) -> list[Ints]:
    """For each stream, an array (events + 1, 3): how many events of each stream come with a prefix, itself included.

    Plays the three streams: an event goes when all it waits for has gone. What is stuck at the end is a deadlock.
    """
    place = {op: (x, 2 * k) for x, ops in enumerate(streams) for k, op in enumerate(ops)}
    needs = [np.zeros((2 * len(ops) + 1, 3), np.int64) for ops in streams]
    gone = [0, 0, 0]
    moving = True
    while moving:
        moving = False
        for x, ops in enumerate(streams):
            while gone[x] < 2 * len(ops):
                before = _direct(ops[gone[x] // 2], waits, place) if gone[x] % 2 == 0 else []
                if any(gone[y] < count for y, count in before):
                    break
                gone[x] += 1
                clock = needs[x][gone[x]]
                clock[:] = needs[x][gone[x] - 1]
                for y, count in before:
                    np.maximum(clock, needs[y][count], out=clock)
                clock[x] = gone[x]
                moving = True
    stuck = [ops[gone[x] // 2] for x, ops in enumerate(streams) if gone[x] < 2 * len(ops)]
    if stuck:
        raise DeadlockError([str(op) for op in stuck], sum(len(ops) - gone[x] // 2 for x, ops in enumerate(streams)))
    return needs


def _direct(op: Op, waits: Waits, place: Mapping[Op, tuple[int, int]]) -> list[tuple[int, int]]:
    """The prefixes (stream, events) of its own device that must be done when `op` starts."""
    return [(place[before][0], place[before][1] + 2) for before in _before(op, waits) if before in place]


def _before(op: Op, waits: Waits) -> Iterator[Op]:
    kind, stage, microbatch = op
    rules = {"F": (), "B": ("F", "R"), "BW": ("F", "R"), "W": ("B",), "O": ("F",), "R": ("O",)}
    for other in rules[kind]:
        yield Op(other, stage, microbatch)
    yield from waits.get(op, ())
