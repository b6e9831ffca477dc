"""Peak of activations in the order of a published schedule, without timing it.

Compute ops of a device run one after the other, so what it holds follows from their order and the bytes of its stages.
An order that is the same for all costs is made once, and tells how many microbatches of each stage are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.cluster.memory import StageBytes
from optpipe.kinds import KINDS
from optpipe.ops import OpArray, Orders
from optpipe.problem import Problem

COUNTED = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "dualpipe-v", "vocab-2")
"""Published schedules whose order follows from the numbers of devices, stages and microbatches alone."""
STEADY_ROUNDS = 4
"""Microbatches for each device of the pipeline, after which the orders of `COUNTED` repeat and no peak grows."""
F, B, W, BW = map(KINDS.index, ("F", "B", "W", "BW"))

Floats = NDArray[np.float64]


class Counts(NamedTuple):
    """Numbers of microbatches that a device holds at the starts of its compute ops: a row for each that differs."""

    stages: Sequence[int]
    """Stages of the device: the columns of `kept` and `operands`."""
    kept: Floats
    """Between the start of F and the end of B."""
    operands: Floats
    """Between B and W."""
    passes: Floats
    """Between S and T, where the rows of the output layer lie on all devices."""
    is_backward: NDArray[np.bool_]
    """True if the op is a B or BW."""
    stage: NDArray[np.int32]
    """Stage of the op."""


def enough_microbatches(schedule: str, devices: int, microbatches: int) -> int:
    """The fewest microbatches with which a schedule of `COUNTED` has the peaks that it has with so many."""
    most = STEADY_ROUNDS * devices
    grows = schedule == "gpipe" or (schedule == "interleaved-1f1b" and microbatches % devices)
    return microbatches if grows else min(microbatches, most)


def counts_in(problem: Problem, orders: Orders) -> list[Counts]:
    """Numbers of microbatches that each device holds in the order of its compute ops."""
    return [
        _counts(OpArray.of(device.compute).numbered(problem.pass_names), stages, len(KINDS))
        for device, stages in zip(orders.devices, problem.stages_of, strict=True)
    ]


def _counts(ops: OpArray, stages: Sequence[int], first_pass: int) -> Counts:
    here, kind = ops.stage[:, None] == np.array(stages), ops.kind[:, None]
    begins, ends, splits, frees = (here & np.isin(kind, kinds) for kinds in ([F], [B, BW], [B], [W]))
    first, second = (ops.kind == first_pass + n for n in range(2))
    counts = (
        np.cumsum(begins, axis=0) - _before(ends),
        _before(splits) - _before(frees),
        np.cumsum(first) - _before(second),
    )
    backward, in_stage = np.isin(ops.kind, [B, BW]), np.where(ops.kind < first_pass, ops.stage, stages[0])
    rows = np.unique(np.column_stack([*counts, backward, in_stage]).astype(np.int32), axis=0)
    n = len(stages)
    floats = rows.astype(np.float64)  # products of floats are the fast ones
    return Counts(stages, floats[:, :n], floats[:, n : 2 * n], floats[:, 2 * n], rows[:, -2] > 0, rows[:, -1])


def _before(happens: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How often it has happened before each row."""
    return np.asarray(np.cumsum(happens, axis=0) - happens)


def peak_bytes(devices: Sequence[Counts], sizes: StageBytes, spread_bytes: float) -> Floats:
    """Peak of each device, for the bytes of its stages and of what a pass keeps."""
    peaks = []
    for held in devices:
        own = list(held.stages)
        level = held.kept @ sizes.kept[own] + held.operands @ sizes.operands[own] + held.passes * spread_bytes
        moment = np.where(held.is_backward, sizes.backward[held.stage], sizes.gathered[held.stage])
        peaks.append(float((level + moment).max()))
    return np.array(peaks)
