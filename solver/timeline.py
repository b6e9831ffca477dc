"""Compiled timelines of list schedulers: when inputs arrive, what memory holds, and ops placed one after another.

A `Timeline` is for schedulers that build orders from nothing (Zero Bubble's heuristics): they decide which F or B a
device runs next, the rest is the same for all of them and stands here. Nothing leaves a device, so a level of memory
for each is enough. `solver.plan_player` is for those that have an order for every device and let ops run ahead of it,
`solver.published.transfer_kernel` adds copies to such an order.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.ops import Floats, Ints, OpArray, Orders
from optpipe.problem import Problem
from optpipe.task_graph import lower

Records = NDArray[Any]

F, B, W, BW, O, R = (cast(int, np.int64(code)) for code in range(6))  # noqa: E741 (the field's names for ops)
"""Kinds of ops as numpy's integers, since numba compiles a function once more for each plain number it is called with.
In the order of `optpipe.kinds.KINDS`."""

NONE = -1
"""In place of a kind, a stage or an op."""
NO_LIMIT = 2**62
"""The budget of a device without one."""

OP_COSTS = np.dtype(
    [
        ("duration_us", np.float64),
        ("delay_us", np.float64),  # from the end of the F or B that it needs on the neighbouring stage
        ("change_bytes", np.int64),  # what it leaves behind
        ("need_bytes", np.int64),  # what must be free when it starts
    ]
)

DEVICE_STATE = np.dtype(
    [
        ("free_us", np.float64),  # end of its last op
        ("idle_us", np.float64),  # between its first op and that end
        ("memory_bytes", np.int64),
        ("budget_bytes", np.int64),
        ("pending_bytes", np.int64),  # by how much all pending W change memory
        ("pending_begin", np.int64),  # its part of `Timeline.pending`
        ("pending_end", np.int64),
        ("ops", np.int64),  # placed so far
    ]
)


class Timeline(NamedTuple):
    """F, B and W placed so far, each on a stage in the order of microbatches.

    `costs[kind, s]`: records OP_COSTS. `devices[d]`: records DEVICE_STATE. `device_of[s]`: the device of a stage.
    `end_us[kind, s, i]`: the end of an op that was placed. `placed[kind, s]`: how many were. `pending[d]`: stages of
    B, in their order; the W of those from `pending_begin` to `pending_end` are left. `order[d]`: the ops of a device
    as ``kind * stages + stage``.
    """

    costs: Records
    devices: Records
    device_of: Ints
    end_us: Floats
    placed: Ints
    pending: Ints
    order: Ints


def op_costs(problem: Problem) -> Records:
    """Costs of F, B and W of every stage: an array (3, stages) of OP_COSTS."""
    costs = np.zeros((3, len(problem.stages)), OP_COSTS)
    graph = lower(problem.with_equal_units())
    types = graph.plain_types[[F, B, W]]
    costs["duration_us"] = graph.duration_us[types]
    costs["change_bytes"], costs["need_bytes"] = graph.change_bytes[types], graph.needed_bytes[types]
    costs["delay_us"][F, 1:], costs["delay_us"][B, :-1] = (
        graph.delays_us[direction][:, 0] for direction in ("forward", "backward")
    )
    return costs


def empty_timeline(problem: Problem, costs: Records) -> Timeline:
    """The timeline of a problem before anything is placed; it shares `costs` with others."""
    stages, m, most = len(problem.stages), problem.units, max(map(len, problem.stages_of))
    devices = np.zeros(len(problem.devices), DEVICE_STATE)
    devices["budget_bytes"] = [NO_LIMIT if d.memory_bytes is None else d.memory_bytes for d in problem.devices]
    return Timeline(
        costs,
        devices,
        np.array([stage.device for stage in problem.stages]),
        np.zeros((3, stages, m)),
        np.zeros((3, stages), np.int64),
        np.zeros((len(devices), most * m), np.int64),
        np.zeros((len(devices), 3 * most * m), np.int64),
    )


def timeline_orders(problem: Problem, line: Timeline) -> Orders:
    """Orders of a timeline on which every op was placed."""
    return Orders.of_compute(
        _device_order(problem, codes[:length]) for codes, length in zip(line.order, line.devices["ops"], strict=True)
    )


def _device_order(problem: Problem, codes: Ints) -> OpArray:
    """The ops with these codes, where the k-th of a kind and stage is that of microbatch k."""
    microbatch = np.empty(len(codes), np.int64)
    microbatch[np.argsort(codes, kind="stable")] = np.tile(np.arange(problem.units), len(codes) // problem.units)
    kind, stage = np.divmod(codes, len(problem.stages))
    return OpArray(kind, stage, microbatch)


@njit(cache=True)
def input_us(line: Timeline, kind: int, s: int) -> float:
    """Arrival of the input of the next F or B of a stage; NaN where that is not placed, or no such op is left."""
    stages, microbatches = line.end_us.shape[1:]
    i = line.placed[kind, s]
    if i == microbatches:
        return np.nan
    if kind == F and s == 0:
        return 0.0
    source_kind, source = (F, s - 1) if kind == F else (B, s + 1)
    if source == stages:
        source_kind, source = F, s
    if i >= line.placed[source_kind, source]:
        return np.nan
    return float(line.end_us[source_kind, source, i] + line.costs[kind, s]["delay_us"])


@njit(cache=True)
def fits(line: Timeline, kind: int, s: int, more_bytes: int = 0) -> bool:
    """True if memory has room for an op of a stage now, and for `more_bytes` with it."""
    device = line.devices[line.device_of[s]]
    return bool(device["memory_bytes"] + line.costs[kind, s]["need_bytes"] + more_bytes <= device["budget_bytes"])


@njit(cache=True)
def can_follow(line: Timeline, kind: int, s: int) -> bool:
    """True if the next F or B of a stage has its input placed, and room once all pending W of its device are done."""
    if np.isnan(input_us(line, kind, s)):
        return False
    return fits(line, kind, s, line.devices[line.device_of[s]]["pending_bytes"])


@njit(cache=True)
def place(line: Timeline, kind: int, s: int, start_us: float) -> None:
    """Place the next op of a stage; its device idles from the end of its last op to `start_us`."""
    d = line.device_of[s]
    device, costs = line.devices[d], line.costs[kind, s]
    if device["ops"]:
        device["idle_us"] += start_us - device["free_us"]
    device["free_us"] = start_us + costs["duration_us"]
    device["memory_bytes"] += costs["change_bytes"]
    line.order[d, device["ops"]] = kind * line.costs.shape[1] + s
    device["ops"] += 1
    line.end_us[kind, s, line.placed[kind, s]] = device["free_us"]
    line.placed[kind, s] += 1
    if kind == B:
        line.pending[d, device["pending_end"]] = s
        device["pending_end"] += 1
        device["pending_bytes"] += line.costs[W, s]["change_bytes"]


@njit(cache=True)
def place_next(line: Timeline, kind: int, s: int) -> None:
    """Place the next F or B of a stage as soon as its device is free and its input there."""
    place(line, kind, s, max(line.devices[line.device_of[s]]["free_us"], input_us(line, kind, s)))


@njit(cache=True)
def pending_weights(line: Timeline, d: int) -> int:
    """Number of W that are left on a device."""
    return int(line.devices[d]["pending_end"] - line.devices[d]["pending_begin"])


@njit(cache=True)
def place_weight(line: Timeline, d: int) -> None:
    """Place the oldest W that is left on a device at once."""
    s = line.pending[d, line.devices[d]["pending_begin"]]
    line.devices[d]["pending_begin"] += 1
    line.devices[d]["pending_bytes"] -= line.costs[W, s]["change_bytes"]
    place(line, W, s, line.devices[d]["free_us"])


class Spans(NamedTuple):
    """By device the time of all its ops, and the span that an earlier run grants it (negative without one)."""

    work_us: Floats
    granted_us: Floats


@njit(cache=True)
def place_after_weights(line: Timeline, spans: Spans, kind: int, s: int, may_fill: bool, gap_share: float) -> None:
    """Place the next F or B of a stage, whose input is placed, behind the W that go before it.

    A W goes where there is no room without it, and where its device would idle for at least as long. One more goes
    where a smaller gap would make the device's span the largest, if it `may_fill` one, or where the gap is at least
    `gap_share` of its time.
    """
    d, arrival_us = line.device_of[s], input_us(line, kind, s)
    while pending_weights(line, d):
        gap_us = arrival_us - line.devices[d]["free_us"]
        weight_us = line.costs[W, line.pending[d, line.devices[d]["pending_begin"]]]["duration_us"]
        if fits(line, kind, s) and gap_us < weight_us:
            if gap_us > 0 and (gap_us >= gap_share * weight_us or (may_fill and gap_us > _slack_us(line, spans, d))):
                place_weight(line, d)
            break
        place_weight(line, d)
    place_next(line, kind, s)


@njit(cache=True)
def _slack_us(line: Timeline, spans: Spans, d: int) -> float:
    """Time for which a device may idle before its span is the largest, or uses up what an earlier run grants."""
    largest_us = 0.0
    for other in range(len(line.devices)):
        largest_us = max(largest_us, spans.work_us[other] + line.devices[other]["idle_us"])
    idle_us = line.devices[d]["idle_us"]
    slack_us = max(largest_us - (spans.work_us[d] + idle_us), 0.0)
    if spans.granted_us[d] >= 0:
        slack_us = max(slack_us, spans.granted_us.max() - spans.granted_us[d] - idle_us)
    return float(slack_us)
