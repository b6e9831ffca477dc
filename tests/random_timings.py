"""Many executions of the same orders at once, each under durations of its own, and the memory that they reach.

Streams, dependencies, channels and waits are followed; nothing here is shared with the simulator or the verifier but
what an op takes and frees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from optpipe.costs import device_effect
from optpipe.ops import Op, Orders
from optpipe.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SCALES_US = (0.01, 1.0, 100.0)
"""An op may take next to nothing beside another of the same schedule. Never nothing: see `random_peaks_bytes`."""


def random_peaks_bytes(problem: Problem, orders: Orders, timings: int, seed: int) -> Ints:
    """The peak of each device in each execution: an array (timings, devices).

    Every op and every delay between devices has another random time in every execution. Where one op ends when another
    starts, the end counts first; as no op is without length, that is what the orders ask for or allow.
    """
    start, end = _executed(problem, orders, timings, np.random.default_rng(seed))
    peaks, first = [], 0
    for device in orders.devices:
        ops = [op for stream in device.streams() for op in stream]
        mine = slice(first, first + len(ops))
        peaks.append(_peaks_bytes(problem, ops, start[mine], end[mine]))
        first += len(ops)
    return np.stack(peaks, axis=1)


def exceeded(problem: Problem, peaks_bytes: Ints) -> list[int]:
    """The devices whose budget some execution broke."""
    budgets = [np.inf if device.memory_bytes is None else device.memory_bytes for device in problem.devices]
    return [int(d) for d in np.flatnonzero((peaks_bytes > budgets).any(axis=0))]


def _executed(problem: Problem, orders: Orders, timings: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Start and end of every op in every execution: two arrays (ops, timings)."""
    ops = list(orders.ops())
    node = {op: k for k, op in enumerate(ops)}
    before: list[list[tuple[int, bool]]] = [[] for _ in ops]
    for earlier, later, crosses in _edges(problem, orders, node):
        before[node[later]].append((node[earlier], crosses))
    start = np.zeros((len(ops), timings))
    end = np.zeros_like(start)
    for k in _sorted([[earlier for earlier, _ in each] for each in before]):
        for earlier, crosses in before[k]:
            delay_us = _random_us(rng, timings) if crosses else 0.0
            np.maximum(start[k], end[earlier] + delay_us, out=start[k])
        end[k] = start[k] + _random_us(rng, timings)
    return start, end


def _random_us(rng: np.random.Generator, timings: int) -> Floats:
    times: Floats = rng.choice(SCALES_US, timings) * (1e-3 + rng.random(timings))
    return times


def _edges(problem: Problem, orders: Orders, there: dict[Op, int]) -> Iterator[tuple[Op, Op, bool]]:
    """Precedences, each with true where a message between two devices lies in between."""
    for ops in (*(stream for device in orders.devices for stream in device.streams()), *orders.channels):
        yield from ((earlier, later, False) for earlier, later in pairwise(ops))
    for op, others in orders.waits.items():
        yield from ((other, op, False) for other in others)
    for op in there:
        for kinds, stage in _needs(op):
            for kind in kinds:
                other = Op(kind, stage, op.microbatch)
                if other in there:
                    yield other, op, problem.stages[stage].device != problem.stages[op.stage].device


def _needs(op: Op) -> list[tuple[tuple[str, ...], int]]:
    """Kinds and stage of the ops of the same microbatch that must end first, by the rules of the contract."""
    kind, s, _ = op
    if kind == "F":
        return [(("F",), s - 1)] if s else []
    if kind in ("B", "BW"):
        return [(("F", "R"), s), (("B", "BW"), s + 1)]
    return [({"W": ("B",), "O": ("F",), "R": ("O",)}[kind], s)]


def _sorted(before: list[list[int]]) -> Iterator[int]:
    """The nodes, each after all that come before it."""
    after: list[list[int]] = [[] for _ in before]
    for k, earlier in enumerate(before):
        for other in earlier:
            after[other].append(k)
    left = [len(earlier) for earlier in before]
    ready = deque(k for k, count in enumerate(left) if not count)
    done = 0
    while ready:
        k = ready.popleft()
        yield k
        done += 1
        for other in after[k]:
            left[other] -= 1
            if not left[other]:
                ready.append(other)
    assert done == len(before), "the orders deadlock"


def _peaks_bytes(problem: Problem, ops: list[Op], start: Floats, end: Floats) -> Ints:
    """The peak of one device with these ops in each execution."""
    if not ops:
        return np.zeros(start.shape[1], np.int64)
    effects = np.array([device_effect(problem.stages[op.stage], op.kind) for op in ops], np.int64)
    change = np.concatenate([effects[:, 1], effects[:, 0]])
    order = np.argsort(np.concatenate([end, start]), axis=0, kind="stable")
    peaks: Ints = np.cumsum(change[order], axis=0).max(axis=0).clip(min=0)
    return peaks
