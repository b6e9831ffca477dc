"""ZB-V: two chunks a device along a V, zero bubble at the memory of 1F1B (Zero Bubble, arXiv 2401.10241, section 6).

Device d holds stage d on the way out and stage 2p - 1 - d on the way back. Forwards go out and come back, and so do
backwards: each starts at device 0, turns at device p - 1 and ends at device 0. A run builds all orders together:

1. The first microbatch goes out and back. A device that waits for it to come back takes more forwards, as long as
   all the microbatches on the devices before it can still come back.
2. Each device takes forwards of both stages in turn, until it is as far as the device before it.
3. Rounds: one backward on every device, then one forward. What comes back goes before what goes out.
4. A W goes where the device would idle for at least as long, where memory has no room for the next op, and where a
   smaller gap would make this device's span the largest. Switches `in_forward` and `in_backward` say before which
   ops that last rule holds; before backwards on their way back it always does. The W that are left go last.

A run is repeated with the idle times of its devices granted to the next, as long as that makes the largest smaller.
Costs, delays and budgets are each stage's and device's own.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numba import njit

from optpipe.errors import MethodError
from optpipe.ops import Floats, Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.published.passes import general_methods, require_v_shape
from solver.timeline import (
    B,
    F,
    Records,
    Spans,
    Timeline,
    can_follow,
    empty_timeline,
    fits,
    input_us,
    op_costs,
    pending_weights,
    place_after_weights,
    place_next,
    place_weight,
    timeline_orders,
)


def zb_v(problem: Problem) -> Orders:
    """The best of all runs. Raises MethodError on placement, or where a budget is too small for every run."""
    require_v_shape(problem, "zb-v")
    costs = op_costs(problem)
    runs = [run for switches in product((True, False), repeat=2) for run in _repeated(problem, costs, *switches)]
    finished = [timeline_orders(problem, run) for run in runs if _is_finished(run)]
    if not finished:
        raise MethodError(_shortage(problem, runs[0]))
    return min(finished, key=lambda orders: simulate(problem, orders).value_us)


def _repeated(problem: Problem, costs: Records, in_forward: bool, in_backward: bool) -> list[Timeline]:
    """Runs, each with the spans of the one before granted, until that helps no more.

    `in_forward`, `in_backward`: before which ops a W may fill a gap that is shorter than itself.
    """
    runs: list[Timeline] = []
    work_us = np.array(problem.work_us, np.float64)
    granted_us = np.full(len(problem.devices), -1.0)
    largest_us = np.inf
    while True:
        run = empty_timeline(problem, costs)
        _run(run, Spans(work_us, granted_us), in_forward, in_backward)
        spans_us: Floats = work_us + run.devices["idle_us"]
        if runs and (not _is_finished(run) or spans_us.max() >= largest_us):
            return runs
        runs.append(run)
        if not _is_finished(run):
            return runs
        granted_us, largest_us = spans_us, spans_us.max()


def _is_finished(run: Timeline) -> bool:
    return bool((run.placed == run.end_us.shape[2]).all())


def _shortage(problem: Problem, run: Timeline) -> str:
    """Error text: the device that lacks the least memory for its next op, and how much."""
    lacks = []
    for d, device in enumerate(problem.devices):
        least = run.devices[d]["memory_bytes"] + run.devices[d]["pending_bytes"]
        for kind in (F, B):
            stage = _next(run, d, kind)
            if device.memory_bytes is not None and not np.isnan(input_us(run, kind, stage)):
                op = Op("FB"[kind], int(stage), int(run.placed[kind, stage]))
                lacks.append((int(least + run.costs[kind, stage]["need_bytes"]) - device.memory_bytes, d, op))
    missing, number, op = min(lacks)
    return (
        f"zb-v comes to a halt before {op}, for which device {number} has {missing} bytes too few with its budget "
        f"of {problem.devices[number].memory_bytes}. Maybe use {general_methods(problem)}, which can offload."
    )


@njit(cache=True)
def _run(line: Timeline, spans: Spans, in_forward: bool, in_backward: bool) -> None:
    """Place the ops of all devices, as far as that goes on."""
    _first_microbatch(line)
    _forwards_in_turn(line)
    while line.placed[B].min() < line.end_us.shape[2]:
        if not _round(line, spans, in_forward, in_backward):
            return
    for d in range(len(line.devices)):
        while pending_weights(line, d):
            place_weight(line, d)


@njit(cache=True)
def _first_microbatch(line: Timeline) -> None:
    """Out and back, with more forwards of devices that wait for it to come back."""
    devices, stages = len(line.devices), line.end_us.shape[1]
    for d in range(devices):
        if can_follow(line, F, d):
            place_next(line, F, d)
    for d in range(devices - 1, -1, -1):
        while _waits(line, d) and _lead(line, d):
            pass
        if can_follow(line, F, stages - 1 - d):
            place_next(line, F, stages - 1 - d)


@njit(cache=True)
def _waits(line: Timeline, d: int) -> bool:
    """True if one more forward fits in time and memory before the first microbatch comes back to a device.

    Each device before may start the way back once more for this, and then must hold both stages of it.
    """
    out, back = d, line.end_us.shape[1] - 1 - d
    comes_back_us = input_us(line, F, back)
    if d == len(line.devices) - 1 or np.isnan(comes_back_us):
        return False
    held_out, held_back = line.costs[F, out]["change_bytes"], line.costs[F, back]["change_bytes"]
    reserve = (d + 1) * (held_out + held_back) - held_out
    in_time = line.devices[d]["free_us"] + line.costs[F, out]["duration_us"] <= comes_back_us
    return bool(in_time and fits(line, F, out, reserve))


@njit(cache=True)
def _lead(line: Timeline, last: int) -> bool:
    """One more forward on the way out on every device up to `last`; False where that cannot be."""
    for d in range(last + 1):
        if not can_follow(line, F, d) or not fits(line, F, d):
            return False
        place_next(line, F, d)
    return True


@njit(cache=True)
def _forwards_in_turn(line: Timeline) -> None:
    """Forwards of both stages in turn on each device, until it is as far as the device before it."""
    devices, stages = len(line.devices), line.end_us.shape[1]
    back = False
    for behind in range(1, devices):
        tries = 0
        while tries < 2 and _behind(line, behind):
            moved = False
            for d in range(devices - 1, behind - 1, -1):
                s = stages - 1 - d if back else d
                if can_follow(line, F, s) and fits(line, F, s):
                    place_next(line, F, s)
                    moved = True
            back = not back
            tries = 0 if moved else tries + 1


@njit(cache=True)
def _behind(line: Timeline, d: int) -> bool:
    """True if device d has fewer forwards than the one before it."""
    out, back = line.placed[F, d], line.placed[F, line.end_us.shape[1] - 1 - d]
    before_out, before_back = line.placed[F, d - 1], line.placed[F, line.end_us.shape[1] - d]
    return bool(out + back < before_out + before_back or back <= before_back < line.end_us.shape[2])


@njit(cache=True)
def _round(line: Timeline, spans: Spans, in_forward: bool, in_backward: bool) -> bool:
    """One backward, then one forward on every device that has one; False where no device has."""
    devices = len(line.devices)
    backward = np.empty(devices, np.int64)
    for d in range(devices):
        backward[d] = _next(line, d, B)
    moved = False
    for turn in range(3 * devices):
        if turn < devices:  # coming back
            d, kind = devices - 1 - turn, B
        else:
            d, kind = turn % devices, B if turn < 2 * devices else F
        if kind == B and (backward[d] == d) != (turn < devices):
            continue
        s = backward[d] if kind == B else _next(line, d, F)
        if can_follow(line, kind, s):
            may_fill = in_forward if kind == F else in_backward or s == d
            place_after_weights(line, spans, kind, s, may_fill, 1.0)
            moved = True
    return moved


@njit(cache=True)
def _next(line: Timeline, d: int, kind: int) -> int:
    """The stage of the next F or B: on the way back where its input is placed, else on the way out."""
    far = line.end_us.shape[1] - 1 - d
    out, back = (d, far) if kind == F else (far, d)
    return out if np.isnan(input_us(line, kind, back)) else back
