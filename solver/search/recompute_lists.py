"""List schedules in which memory decides, as each F starts, whether its microbatch is kept or recomputed.

As in `ada-offload` a device that is free takes what is ready: B before F, and W when nothing else is ready or too many
are left over. Here every device keeps its budget as it goes. An F runs in the mode that keeps its activation if there
is room, else in one that recomputes; some room stays free so that the activation of one microbatch can always be made
anew. It is made inside the backward where a stage can, or ahead of it: as soon as the gradient is on its way, or
whenever the device has nothing else to do. Nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple, cast

import numpy as np
from numba import njit

from optpipe.costs import device_effect
from optpipe.ops import KINDS, Bools, DeviceOrders, Floats, Ints, OpArray, Orders
from optpipe.problem import Problem, Stage
from solver.timeline import NO_LIMIT, NONE, B, F, W

DROP, MAKE, INSIDE = (cast(int, np.int64(row)) for row in (3, 4, 5))
"""Rows beside F, B and W: the F of a microbatch that is recomputed, its C, and its CB."""

_KIND_OF_ROW = np.array([KINDS.index(kind) for kind in ("F", "B", "W", "F", "C", "CB")])

KEPT, DROPPED, MADE = range(3)
"""States of an activation."""

WITH_GRADIENT, ON_ITS_WAY, WHEN_IDLE = range(3)
"""When a microbatch is recomputed: once its gradient is there, once it is known to come, or in idle time as well."""


LEFT_BEFORE_DROP = 1
"""W that a device leaves over rather than make room with them for an F that is kept."""


class Course(NamedTuple):
    """Costs of ops by row and stage, and where stages are; device d holds ``stages[first[d]:first[d + 1]]``.

    `delay_us`: from the neighbour's F and B to one's own. `need_bytes` must be free when an op starts, `change_bytes`
    is what it leaves behind. `spare_bytes`: what stays free after an F, so that what is there can be run to its end;
    `more_bytes`: what stays free beside it after an F that is kept, so that others can follow that are not.
    """

    us: Floats
    delay_us: Floats
    need_bytes: Ints
    change_bytes: Ints
    spare_bytes: Ints
    more_bytes: Ints
    recomputes: Bools
    inside: Bools
    device_of: Ints
    first: Ints
    stages: Ints
    budget_bytes: Ints


class State(NamedTuple):
    """Ops placed so far, each on a stage in the order of microbatches.

    `end_us[kind, s, i]`: the end of an F or B. `placed[kind, s]`: how many F, B and W. `held[s, i]`: the state of an
    activation. `pending[d]`: stages of B in their order, whose W from ``left[0, d]`` to ``left[1, d]`` are left.
    `order[d]`: row, stage and microbatch of the ops of a device, ``left[2, d]`` of them.
    """

    end_us: Floats
    placed: Ints
    held: Ints
    free_us: Floats
    level_bytes: Ints
    pending: Ints
    left: Ints
    order: Ints


def recompute_lists(
    problem: Problem, modes: Sequence[int], in_flight: int, late_weights: int, ahead: int, behind: int
) -> Orders | None:
    """Orders with at most `in_flight` microbatches between their first F and their last B; None if memory lacks room.

    ``modes[s]`` is the mode of what stage s recomputes, 0 if it keeps all. At most `late_weights` W are left over on a
    device while it does other things. `ahead` says when C may run. An activation is kept only where there is room
    beside it for `behind` microbatches that are recomputed: without it devices wait for memory.
    """
    course = _course(problem, modes, behind)
    state = _begin(problem)
    if not _run(course, state, in_flight, late_weights, ahead):
        return None
    devices = []
    for ops, count in zip(state.order, state.left[2].tolist(), strict=True):
        row, stage, microbatch = ops[:count].T
        devices.append(DeviceOrders(OpArray(_KIND_OF_ROW[row], stage, microbatch)))
    return Orders(devices, modes=np.where(state.held == KEPT, 0, np.array(modes, np.int64)[:, None]))


def _course(problem: Problem, modes: Sequence[int], behind: int) -> Course:
    stages = problem.stages
    recomputed = [stage.choices[number] for stage, number in zip(stages, modes, strict=True)]
    needs, changes = zip(*(_bytes(stage, number) for stage, number in zip(stages, modes, strict=True)), strict=True)
    need, change = np.array(needs).T, np.array(changes).T
    recomputes = np.array([mode.recomputes for mode in recomputed])
    inside = np.array([mode.recomputes and mode.segment_bytes is not None for mode in recomputed])
    duration = {kind: np.array([stage.duration_us(kind) for stage in stages]) for kind in "FBW"}
    again = np.array([mode.recompute_us for mode in recomputed])
    backward = np.where(recomputes, np.where(inside, need[INSIDE], need[MAKE] + np.maximum(need[B], 0)), need[B])
    forward = np.where(recomputes, need[DROP], need[F])
    spare = np.zeros(len(stages), np.int64)
    for of_device in problem.stages_of:
        for k, s in enumerate(of_device):  # later stages of the device need room as well, or its microbatches stand
            spare[s] = backward[of_device].max() + forward[of_device[k + 1 :]].sum()
    return Course(
        us=np.array([*duration.values(), duration["F"], again, duration["B"] + again]),
        delay_us=np.array([[0, *problem.forward_delay_us], [*problem.backward_delay_us, 0]], np.float64),
        need_bytes=need,
        change_bytes=change,
        spare_bytes=spare,
        more_bytes=np.array(
            [
                stage.choices[number].forward_workspace_bytes + behind * stage.choices[number].kept_bytes
                if behind
                else 0
                for stage, number in zip(stages, modes, strict=True)
            ]
        ),
        recomputes=recomputes,
        inside=inside,
        device_of=np.array([stage.device for stage in stages]),
        first=np.cumsum([0, *map(len, problem.stages_of)]),
        stages=np.concatenate([np.array(of_device, np.int64) for of_device in problem.stages_of]),
        budget_bytes=np.array([NO_LIMIT if d.memory_bytes is None else d.memory_bytes for d in problem.devices]),
    )


def _bytes(stage: Stage, number: int) -> tuple[list[int], list[int]]:
    """What an op of each row needs, and what it leaves behind."""
    kept, other = stage.choices[0], stage.choices[number]
    rows = [("F", kept), ("B", kept), ("W", kept), ("F", other), ("C", other), ("CB", other)]
    effects = [device_effect(stage, kind, mode) for kind, mode in rows]
    changes = [effect.at_start + effect.at_end for effect in effects]
    return [max(effect.at_start, change) for effect, change in zip(effects, changes, strict=True)], changes


def _begin(problem: Problem) -> State:
    stages, m, devices = len(problem.stages), problem.units, len(problem.devices)
    most = max(map(len, problem.stages_of)) * m
    return State(
        end_us=np.zeros((2, stages, m)),
        placed=np.zeros((3, stages), np.int64),
        held=np.zeros((stages, m), np.int64),
        free_us=np.zeros(devices),
        level_bytes=np.zeros(devices, np.int64),
        pending=np.zeros((devices, most), np.int64),
        left=np.zeros((3, devices), np.int64),
        order=np.zeros((devices, 4 * most, 3), np.int64),
    )


@njit(cache=True)
def _run(course: Course, state: State, in_flight: int, late_weights: int, ahead: int) -> bool:
    """Place ops in the order of time; False if a device is left with ops for which it never had room."""
    stages, microbatches = state.held.shape
    wake = [(0.0, course.device_of[0])]
    while wake:
        now, d = heappop(wake)
        if now < state.free_us[d]:
            continue
        row, s = _choose(course, state, d, now, in_flight, late_weights, ahead)
        if row == NONE:
            continue
        _place(course, state, d, row, s, now)
        heappush(wake, (state.free_us[d], d))
        if row in (W, MAKE):
            continue
        forwards = row in (F, DROP)
        fed = s + 1 if forwards else s - 1
        if 0 <= fed < stages:
            near = course.device_of[fed]
            comes_us = state.free_us[d] + course.delay_us[F if forwards else B, fed]
            heappush(wake, (max(comes_us, state.free_us[near]), near))
            if not forwards and ahead != WITH_GRADIENT:
                heappush(wake, (max(now, state.free_us[near]), near))
    return bool((state.placed[W] == microbatches).all())


@njit(cache=True)
def _place(course: Course, state: State, d: int, row: int, s: int, now: float) -> None:
    """Run an op on a device now."""
    end_us = now + course.us[row, s]
    state.free_us[d] = end_us
    state.level_bytes[d] += course.change_bytes[row, s]
    kind = F if row == DROP else B if row in (INSIDE, MAKE) else row
    i = state.placed[kind, s]
    state.order[d, state.left[2, d], 0] = row
    state.order[d, state.left[2, d], 1] = s
    state.order[d, state.left[2, d], 2] = i
    state.left[2, d] += 1
    if row == MAKE:
        state.held[s, i] = MADE
        return
    if row == DROP:
        state.held[s, i] = DROPPED
    state.placed[kind, s] += 1
    if kind == W:
        state.left[0, d] += 1
        return
    state.end_us[kind, s, i] = end_us
    if kind == B:
        state.pending[d, state.left[1, d]] = s
        state.left[1, d] += 1


@njit(cache=True)
def _choose(
    course: Course, state: State, d: int, now: float, in_flight: int, late_weights: int, ahead: int
) -> tuple[int, int]:
    """Row and stage of what a free device runs now; the row is NONE where it waits."""
    microbatches = state.held.shape[1]
    mine = course.stages[course.first[d] : course.first[d + 1]]
    rank, chosen, next_us = (microbatches, 0), (NONE, 0), np.inf
    for s in mine:
        i, comes_us = state.placed[B, s], _gradient_us(course, state, s)
        if np.isnan(comes_us):
            continue
        if comes_us > now:
            next_us = min(next_us, comes_us)
        elif (i, -s) < rank:
            row = B if state.held[s, i] != DROPPED else INSIDE if course.inside[s] else MAKE
            if _has_room(course, state, d, row, s, 0):
                rank, chosen = (i, -s), (row, s)
    if chosen[0] == NONE and ahead != WITH_GRADIENT:
        for s in mine:
            i = state.placed[B, s]
            if i == microbatches or (i, -s) > rank or state.held[s, i] != DROPPED:
                continue
            if _gradient_us(course, state, s) > now and _has_room(course, state, d, MAKE, s, 0):
                rank, chosen = (i, -s), (MAKE, s)
    if chosen[0] == NONE:
        for s in mine:
            i, comes_us = state.placed[F, s], _forward_us(course, state, s, in_flight)
            if np.isnan(comes_us):
                continue
            if comes_us > now:
                next_us = min(next_us, comes_us)
            elif (i, -s) < rank:
                row = F
                if not _has_room(course, state, d, F, s, course.spare_bytes[s] + course.more_bytes[s]):
                    row = DROP
                    if not course.recomputes[s] or not _has_room(course, state, d, DROP, s, course.spare_bytes[s]):
                        continue
                rank, chosen = (i, -s), (row, s)
    pending = state.left[1, d] - state.left[0, d]
    if pending:
        s = state.pending[d, state.left[0, d]]
        # A gap is long if the oldest W is done before the next input comes.
        fills_gap = chosen[0] == NONE and now + course.us[W, s] <= next_us
        makes_room = chosen[0] == DROP and pending > LEFT_BEFORE_DROP
        if pending > late_weights or fills_gap or makes_room:
            return W, s
    if chosen[0] == NONE and ahead == WHEN_IDLE:
        for s in mine:
            i = state.placed[B, s]
            if i == state.placed[F, s] or (i, -s) > rank or state.held[s, i] != DROPPED:
                continue
            if now + course.us[MAKE, s] <= next_us and _has_room(course, state, d, MAKE, s, 0):
                rank, chosen = (i, -s), (MAKE, s)
    return chosen


@njit(cache=True)
def _has_room(course: Course, state: State, d: int, row: int, s: int, spare_bytes: int) -> bool:
    return bool(state.level_bytes[d] + course.need_bytes[row, s] + spare_bytes <= course.budget_bytes[d])


@njit(cache=True)
def _gradient_us(course: Course, state: State, s: int) -> float:
    """Arrival of what the next B of a stage needs; NaN where that is not placed, or no B is left."""
    stages, microbatches = state.held.shape
    i = state.placed[B, s]
    kind, near = (F, s) if s + 1 == stages else (B, s + 1)
    if i == microbatches or i >= state.placed[kind, near]:
        return np.nan
    return float(state.end_us[kind, near, i] + course.delay_us[B, s])


@njit(cache=True)
def _forward_us(course: Course, state: State, s: int, in_flight: int) -> float:
    """Arrival of the input of the next F of a stage; NaN where that is not placed, or no F is left.

    On the first stage a microbatch waits for the last B of one in flight.
    """
    microbatches = state.held.shape[1]
    i = state.placed[F, s]
    if i == microbatches:
        return np.nan
    if s:
        return float(state.end_us[F, s - 1, i] + course.delay_us[F, s]) if i < state.placed[F, s - 1] else np.nan
    if i < in_flight:
        return 0.0
    return float(state.end_us[B, 0, i - in_flight]) if i - in_flight < state.placed[B, 0] else np.nan
