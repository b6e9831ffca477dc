"""What does not change during a local search: ops as numbers, and what the rules say of each class of them.

An op is ``class << shift | microbatch`` with ``class = kind * stages + stage``, kinds in the order of KINDS. A fused
backward is a B with its W right behind it. A *group* is the devices that share copy channels, usually one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.memory import device_effect
from optpipe.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Codes = NDArray[np.int32]
Flags = NDArray[np.bool_]
Records = NDArray[Any]

KINDS = "FBWOR"
F, B, W, O, R = range(len(KINDS))  # noqa: E741 (the field's names for ops)
NONE = -1
"""No class, or the place of an op that is in no sequence."""

MARKS = 48
"""Marks a sweep at most; a sweep resumes at one of them."""

NO_BUDGET = np.iinfo(np.int64).max // 4
"""The budget of a device without one: no sum of bytes reaches it, and sums with it stay whole numbers of 64 bits."""

_CLASS = np.dtype(
    [
        ("device", np.int32),
        ("group", np.int32),
        ("stream", np.int32),  # a device's compute stream has its number; channels follow, two a group
        ("acquires", np.int32),
        ("releases", np.int32),
        ("before", np.int32),  # the class whose op of the same microbatch must end `delay_us` before, on another stream
        ("returns", np.int32),  # for B: the class of its R
        ("after", np.int32),  # whose `before` or `returns` this is, O aside
        ("leaves", np.int32),  # for F: the class of its O
        ("duration_us", np.float64),
        ("delay_us", np.float64),
        ("after_us", np.float64),  # the delay to `after`
        ("need_bytes", np.int64),  # the most that it adds while it runs or at its end
        ("change_bytes", np.int64),  # what it leaves behind
    ]
)


class Table(NamedTuple):
    """The constants. `classes`: one record a class.

    `first`: by group, where its part of the sequence array begins. `alone`: by group, its device if it has one only.
    `step`: ops from one mark of a sweep to the next. `offloadable`: the stages that may offload.
    """

    shift: int
    stages: int
    microbatches: int
    devices: int
    streams: int
    step: int
    spans: bool
    classes: Records
    first: Ints
    alone: Ints
    budget_bytes: Ints
    offloadable: Ints


def table_of(problem: Problem) -> Table:
    """The constants of a problem."""
    count, m = len(problem.stages), problem.microbatches
    classes = _classes(problem)
    capacity = np.bincount(classes["group"], minlength=len(problem.channel_groups)) * m
    offloadable = [s for s, stage in enumerate(problem.stages) if stage.offload]
    return Table(
        shift=max(m - 1, 1).bit_length(),
        stages=count,
        microbatches=m,
        devices=len(problem.devices),
        streams=len(problem.devices) + 2 * len(problem.channel_groups),
        step=(3 * count + 2 * len(offloadable)) * m // MARKS + 1,
        spans=problem.objective == "device_span",
        classes=classes,
        first=np.concatenate([[0], np.cumsum(capacity)[:-1]]).astype(np.int64),
        alone=np.array([g[0] if len(g) == 1 else NONE for g in problem.channel_groups], np.int64),
        budget_bytes=budgets_bytes(problem),
        offloadable=np.array(offloadable, np.int64),
    )


def budgets_bytes(problem: Problem) -> Ints:
    """For each device its budget, `NO_BUDGET` where there is none."""
    return np.array([NO_BUDGET if d.memory_bytes is None else d.memory_bytes for d in problem.devices], np.int64)


def _classes(problem: Problem) -> Records:
    """The records, with what does not look at other classes."""
    stages, count = problem.stages, len(problem.stages)
    group_of = {d: g for g, members in enumerate(problem.channel_groups) for d in members}
    classes = np.zeros(len(KINDS) * count, _CLASS)
    for c, record in enumerate(classes):
        kind, stage = KINDS[c // count], stages[c % count]
        effect = device_effect(stage, kind)
        record["device"], record["group"] = stage.device, group_of[stage.device]
        record["stream"] = _stream(problem, group_of, kind, stage.device)
        record["acquires"], record["releases"] = effect.acquires, effect.releases
        record["duration_us"] = 0.0 if kind in "OR" and stage.offload is None else stage.duration_us(kind)
        record["need_bytes"] = max(effect.at_start, sum(effect))
        record["change_bytes"] = sum(effect)
    _relate(problem, classes)
    return classes


def _stream(problem: Problem, group_of: dict[int, int], kind: str, device: int) -> int:
    if kind in "FBW":
        return device
    return len(problem.devices) + 2 * group_of[device] + int(kind == "R" and problem.copy_channels.duplex)


def _relate(problem: Problem, classes: Records) -> None:
    """Fill in what waits for what on other streams."""
    count = len(problem.stages)
    for name in ("before", "returns", "after", "leaves"):
        classes[name] = NONE

    def follow(after: int, before: int, delays_us: Sequence[float]) -> None:
        for k, delay_us in enumerate(delays_us):
            classes["before"][after + k], classes["after"][before + k] = before + k, after + k
            classes["delay_us"][after + k] = classes["after_us"][before + k] = delay_us

    follow(F * count + 1, F * count, problem.forward_delay_us)
    follow(B * count, B * count + 1, problem.backward_delay_us)
    for s, stage in enumerate(problem.stages):
        out, back = O * count + s, R * count + s
        classes["before"][out], classes["before"][back], classes["after"][out] = s, out, back
        if stage.offload:
            classes["leaves"][s] = out
            classes["returns"][B * count + s], classes["after"][back] = back, B * count + s
