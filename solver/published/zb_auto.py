"""Zero Bubble's automatic schedule: a list heuristic with three switches, eight runs (Zero Bubble, section 3).

Every run builds the orders of all stages together, op by op:

1. Warm-up: each stage takes as many forwards as its memory and the stages before it allow while its first B is on
   its way. Switch `even`: not more than keep the numbers of forwards evenly spread over the stages.
2. Then forwards and B alternate, round by round. Switch `by_time`: the op that can start first goes first, B before F.
3. A W goes where the device would idle at least as long as the W takes, where memory has no room for the next op,
   and where a smaller idle gap would make this stage's bubble the largest of all. Switch `fill`: also where the device
   would idle half as long as the W takes.
4. The W that are left go last.

Stage s always stays ahead of stage s + 1 in forwards. Costs, delays and budgets are each stage's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numba import njit

from optpipe.errors import MethodError
from optpipe.ops import Ints, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.stage import Stage
from solver.published.passes import general_methods, require_one_stage_a_device
from solver.timeline import (
    NONE,
    B,
    F,
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


def zb_auto(problem: Problem, forwards: Sequence[int] | None = None) -> Orders:
    """The best of the eight runs. Raises MethodError on placement, or where a single microbatch exceeds a budget.

    Given `forwards`, each stage takes so many before its first B, in place of step 1.
    """
    require_one_stage_a_device(problem, "zb-auto")
    costs = op_costs(problem)
    costs["need_bytes"] = np.transpose([_room_bytes(stage) for stage in problem.stages])
    for s, stage in enumerate(problem.stages):
        budget, needed = problem.devices[stage.device].memory_bytes, int(costs[F, s]["need_bytes"])
        if budget is not None and needed > budget:
            raise MethodError(
                f"zb-auto needs {needed} bytes for one microbatch on stages[{s}], but device {stage.device} has "
                f"{budget}: {needed - budget} too few. Maybe use {general_methods(problem)}, which can offload."
            )
    finished = []
    given = np.array([] if forwards is None else forwards, np.int64)
    idle = Spans(np.zeros(len(problem.devices)), np.full(len(problem.devices), -1.0))  # idle times count, not spans
    for switches in product((False, True), repeat=3):
        line = empty_timeline(problem, costs)
        if (forwards is None or not switches[0]) and _run(line, idle, given, *switches):
            finished.append(timeline_orders(problem, line))
    if not finished:
        raise MethodError(
            "zb-auto comes to a halt in each of its runs, without room for the next op of any stage within "
            f"devices[].memory_bytes. Maybe use {general_methods(problem)}."
        )
    return min(finished, key=lambda orders: simulate(problem, orders).value_us)


def _room_bytes(stage: Stage) -> tuple[int, int, int]:
    """Bytes that must be free when F, B or W starts, so that it and the rest of its microbatch's ops can run."""
    work, grows = stage.workspace_bytes, stage.backward_weight_bytes - stage.activation_bytes
    backward = max(work.B, grows, grows + work.W)
    return stage.activation_bytes + max(work.F, backward), backward, work.W


@njit(cache=True)
def _run(line: Timeline, spans: Spans, given: Ints, even: bool, by_time: bool, fill: bool) -> bool:
    """One run under given switches; False where an op finds no room."""
    _warm_up(line, given, even)
    finished = _by_time(line, spans, fill) if by_time else _by_rounds(line, spans, fill)
    if finished:
        for d in range(len(line.devices)):
            while pending_weights(line, d):
                place_weight(line, d)
    return finished


@njit(cache=True)
def _warm_up(line: Timeline, given: Ints, even: bool) -> None:
    """Forwards up to the first B of every stage, or the `given` number of them, and these first B."""
    stages = len(line.device_of)
    for s in range(stages):
        place_next(line, F, s)
    for s in range(stages - 1, -1, -1):
        if len(given):
            while line.placed[F, s] < given[s] and _lead(line, s):
                pass
        else:
            while s < stages - 1 and _wants_forward(line, s, even) and _lead(line, s):
                pass
        if not fits(line, B, s):
            return
        place_next(line, B, s)


@njit(cache=True)
def _wants_forward(line: Timeline, s: int, even: bool) -> bool:
    """True if stage `s` takes one more forward before its first B."""
    forwards, microbatches = line.placed[F, s], line.end_us.shape[2]
    if forwards >= microbatches or (even and forwards >= _even_share(line, s)):
        return False
    free_us = line.devices[line.device_of[s]]["free_us"]
    return bool(free_us + line.costs[F, s]["duration_us"] <= input_us(line, B, s))


@njit(cache=True)
def _even_share(line: Timeline, s: int) -> int:
    """Forwards of stage `s` before its first B if the first stage fills its memory and the last takes one."""
    last = len(line.device_of) - 1
    budget = line.devices[line.device_of[0]]["budget_bytes"]
    room = min(budget // max(line.costs[F, 0]["change_bytes"], 1), line.end_us.shape[2])
    return int(max(last + 1 - s, np.floor(room - s * (room - 1) / last)))


@njit(cache=True)
def _lead(line: Timeline, s: int) -> bool:
    """One more forward on stage `s`, and on the stages before it as many as keep each ahead of the next.

    Does nothing and returns False where one of them has no room for that.
    """
    more = np.zeros(s + 1, np.int64)
    for j in range(s + 1):
        wanted = min(line.end_us.shape[2], line.placed[F, s] + 1 + s - j)
        more[j] = max(0, wanted - line.placed[F, j])
        if more[j] and not fits(line, F, j, (more[j] - 1) * line.costs[F, j]["change_bytes"]):
            return False
    for j in range(s + 1):
        for _ in range(more[j]):
            place_next(line, F, j)
    return True


@njit(cache=True)
def _by_rounds(line: Timeline, spans: Spans, fill: bool) -> bool:
    """One F on every stage, first to last, then one B on every stage, last to first. False when stuck."""
    stages, total = line.end_us.shape[1], line.end_us[B].size
    while line.placed[B].sum() < total:
        moved = False
        for turn in range(2 * stages):
            s, kind = (turn, F) if turn < stages else (2 * stages - 1 - turn, B)
            if can_follow(line, kind, s):
                place_after_weights(line, spans, kind, s, True, 0.5 if fill else 1.0)
                moved = True
        if not moved:
            return False
    return True


@njit(cache=True)
def _by_time(line: Timeline, spans: Spans, fill: bool) -> bool:
    """Always the op that can start first; at equal times B before F, B of late and F of early stages first.

    False when stuck.
    """
    stages = line.end_us.shape[1]
    starts, kinds = np.empty(stages), np.empty(stages, np.int64)
    for s in range(stages):
        starts[s], kinds[s] = _first_choice(line, s)
    left = line.end_us[B].size - line.placed[B].sum()
    while left:
        s = int(np.argmin(starts))
        for other in range(s + 1, stages):
            if starts[other] == starts[s] and kinds[other] == B:
                s = other
        kind = kinds[s]
        if kind == NONE:
            return False
        place_after_weights(line, spans, kind, s, True, 0.5 if fill else 1.0)
        left -= kind == B
        fed = s + 1 if kind == F else s - 1
        for changed in (s, fed):
            if 0 <= changed < stages:
                starts[changed], kinds[changed] = _first_choice(line, changed)
    return True


@njit(cache=True)
def _first_choice(line: Timeline, s: int) -> tuple[float, int]:
    """Earliest start among the next F and B of stage `s`, and the kind of that op."""
    start, chosen = np.inf, NONE
    for kind in (B, F):
        if can_follow(line, kind, s):
            its_start = max(line.devices[line.device_of[s]]["free_us"], input_us(line, kind, s))
            if its_start < start:
                start, chosen = its_start, kind
    return start, chosen
