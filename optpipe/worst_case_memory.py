"""The largest memory that a device can reach under any durations that keep order and waits.

What has happened on a device at some moment is a set of events (starts and ends of ops) that contains, with each
event, everything that must come before it; and every such set can happen, since durations are free. So the peak is
the largest weight of a closed set: a maximum closure. A device runs three streams, each in order, so a closed set
is three prefixes, and dependencies through other devices add nothing (they leave and reach the compute stream, which
is totally ordered). Offloads only free memory, hence for given prefixes of compute and reload the least prefix of
offloads that these require is best, and the closure is found by a scan instead of a minimum cut.

This module is the verifier's own: it takes nothing from the simulator or the solvers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.errors import DeadlockError
from optpipe.ops import KINDS, Op, OpArray
from optpipe.problem import Problem, Stage

Ints = NDArray[np.int64]

Streams = tuple[Sequence[Op], Sequence[Op], Sequence[Op]]
"""Compute, offload and reload of one device, in order."""

Waits = Mapping[Op, Sequence[Op]]


def worst_case_peak_bytes(problem: Problem, streams: Streams, waits: Waits) -> int:
    """The largest activation memory of a device over every choice of durations.

    Raises DeadlockError if the streams' orders and waits contradict one another on this device.
    """
    columns = [OpArray.of(ops) for ops in streams]
    compute, offload, reload = (_levels(problem, ops) for ops in columns)
    if not columns[1] and not columns[2]:
        return int(compute.max())
    ops = OpArray.joined(columns)
    lengths = np.array([len(stream) for stream in columns])
    needs, gone = _required_prefixes(lengths, *_direct(problem, ops, lengths, waits))
    if (gone < 2 * lengths).any():
        raise _deadlock(columns, gone // 2)
    of_compute, _, of_reload = np.split(needs, np.cumsum(2 * lengths + 1)[:-1])
    return int(_largest(compute, offload, reload, of_compute, of_reload))


def _levels(problem: Problem, ops: OpArray) -> Ints:
    """Memory after each prefix of a stream's events (start, end, start, end, ...), all else left aside."""
    here, stage = np.unique(ops.stage, return_inverse=True)
    changes = np.array([[memory_changes(problem.stages[s], kind) for s in here] for kind in KINDS], np.int64)
    return np.concatenate([[0], np.cumsum(changes[ops.kind, stage])]) if len(ops) else np.zeros(1, np.int64)


def memory_changes(stage: Stage, kind: str) -> tuple[int, int]:
    """Bytes that an op of a stage adds to its device's memory at its start and at its end, by the contract."""
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


def _direct(problem: Problem, ops: OpArray, lengths: Ints, waits: Waits) -> tuple[Ints, Ints, Ints]:
    """What must end on its own device before each op starts, by rules and waits.

    `ops` are those of all three streams. Returns for op k its entries `first[k]` to `first[k + 1]`, and of each entry
    the stream and how many of that stream's events must be over.
    """
    stages, microbatches = len(problem.stages), problem.microbatches
    key = (ops.kind * stages + ops.stage) * microbatches + ops.microbatch
    order = np.argsort(key)
    sorted_key = key[order]

    def pairs(after: Ints, before_key: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Which ops wait for which, where those are there."""
        slot = np.minimum(np.searchsorted(sorted_key, before_key), len(key) - 1)
        there = sorted_key[slot] == before_key
        yield after[there], order[slot[there]]

    found: list[tuple[Ints, Ints]] = []
    for kind, earlier in _EARLIER.items():
        after = np.flatnonzero(ops.kind == KINDS.index(kind))
        for before in earlier:
            found += pairs(after, key[after] + (KINDS.index(before) - KINDS.index(kind)) * stages * microbatches)
    if waits:
        named = [(k, other) for k, op in enumerate(ops) for other in waits.get(op, ())]
        others = OpArray.of([other for _, other in named])
        known = (others.stage < stages) & (others.microbatch < microbatches)  # else a key would be that of another op
        after = np.array([k for k, _ in named], np.int64)[known]
        found += pairs(after, ((others.kind * stages + others.stage) * microbatches + others.microbatch)[known])
    target, source = (np.concatenate(column) for column in zip(*found, strict=True))
    by_target = np.argsort(target, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=len(key)))])
    stream = np.repeat(np.arange(len(lengths)), lengths)[source[by_target]]
    place = source[by_target] - (np.cumsum(lengths) - lengths)[stream]
    return first, stream, 2 * place + 2


_EARLIER = {"B": ("F", "R"), "BW": ("F", "R"), "W": ("B",), "O": ("F",), "R": ("O",)}
"""The ops of the same stage and microbatch that must end before one of a kind starts."""


@njit(cache=True)
def _required_prefixes(lengths: Ints, first: Ints, stream: Ints, events: Ints) -> tuple[Ints, Ints]:
    """How many events of each stream come with a prefix of one, and how many events of each could go at all.

    The first has three columns and for each stream events + 1 rows, one stream after another. Plays the three streams:
    an event goes when all it waits for has gone. What is stuck at the end is a deadlock.
    """
    begin = np.zeros(3, np.int64)
    row = np.zeros(3, np.int64)
    for x in range(1, 3):
        begin[x] = begin[x - 1] + lengths[x - 1]
        row[x] = row[x - 1] + 2 * lengths[x - 1] + 1
    needs = np.zeros((row[2] + 2 * lengths[2] + 1, 3), np.int64)
    gone = np.zeros(3, np.int64)
    moving = True
    while moving:
        moving = False
        for x in range(3):
            while gone[x] < 2 * lengths[x]:
                op = begin[x] + gone[x] // 2
                low, high = (first[op], first[op + 1]) if gone[x] % 2 == 0 else (0, 0)
                blocked = False
                for entry in range(low, high):
                    blocked = blocked or gone[stream[entry]] < events[entry]
                if blocked:
                    break
                gone[x] += 1
                clock = needs[row[x] + gone[x]]
                clock[:] = needs[row[x] + gone[x] - 1]
                for entry in range(low, high):
                    other = needs[row[stream[entry]] + events[entry]]
                    for y in range(3):
                        clock[y] = max(clock[y], other[y])
                clock[x] = gone[x]
                moving = True
    return needs, gone


@njit(cache=True)
def _largest(compute: Ints, offload: Ints, reload: Ints, of_compute: Ints, of_reload: Ints) -> int:
    """The largest sum of levels over all prefixes that can occur together."""
    peak = 0
    most_reloads = 0
    for done in range(len(compute)):
        while most_reloads + 1 < len(reload) and of_reload[most_reloads + 1, 0] <= done:
            most_reloads += 1
        for reloads in range(of_compute[done, 2], most_reloads + 1):
            offloads = max(of_compute[done, 1], of_reload[reloads, 1])
            peak = max(peak, compute[done] + offload[offloads] + reload[reloads])
    return peak


def _deadlock(columns: Sequence[OpArray], gone: Ints) -> DeadlockError:
    stuck = [str(ops[done]) for ops, done in zip(columns, gone.tolist(), strict=True) if done < len(ops)]
    return DeadlockError(stuck, sum(map(len, columns)) - int(gone.sum()))
