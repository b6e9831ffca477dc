"""Fills the idle ends of a repeated plan: passes that can run early do, as far as the memory of the plan goes."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.memory import device_effect, effect_table
from optpipe.orders import OpArray, Orders
from optpipe.problem import Problem
from solver.finish import peak_budgets

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

F, B, W = range(3)


def filled(problem: Problem, plan: Sequence[OpArray], unit_costs: bool) -> Orders:
    """A plan run in the order of time, where a device takes a later pass while the planned one has to wait.

    A pass is only taken early when its input is there, and when all that is planned before it still has room. So
    what is left of the plan can always run, and the peak of the plan is kept. Every pass takes one unit of time and
    transfers none if `unit_costs`, else what the problem says.
    """
    ops, lengths = OpArray.joined(plan), [len(passes) for passes in plan]
    place = np.empty((3, len(problem.stages), problem.microbatches), np.int64)
    place[ops.kind, ops.stage, ops.microbatch] = np.arange(len(ops))
    effects = effect_table(problem, device_effect)[:3]
    duration = np.array([[stage.duration_us(kind) for stage in problem.stages] for kind in "FBW"], np.float64)
    delay = np.array([[*problem.forward_delay_us, 0.0], [*problem.backward_delay_us, 0.0]], np.float64)
    order = _run(
        _Plan(
            np.cumsum([0, *lengths]),
            np.array(problem.stages_of),
            ops.kind,
            ops.stage,
            ops.microbatch,
            place,
            np.ones_like(duration) if unit_costs else duration,
            np.zeros_like(delay) if unit_costs else delay,
            effects.sum(axis=2),
            np.maximum(effects[:, :, 0], effects.sum(axis=2)),
            np.array(peak_budgets(problem, Orders.of_compute(plan))),
        )
    )
    return Orders.of_compute([ops[places] for places in np.split(order, np.cumsum(lengths)[:-1])])


class _Plan(NamedTuple):
    """The passes of all devices, those of device d from `first[d]` to `first[d + 1]`, and what they cost.

    `place[kind, stage, microbatch]` is where a pass stands. Durations, memory changes and the most memory that a pass
    takes are arrays (kinds, stages); `delay_us[0, s]` and `delay_us[1, s]` are the ways from stage s to s + 1 and back.
    """

    first: Ints
    stages_of: Ints
    kind: Ints
    stage: Ints
    microbatch: Ints
    place: Ints
    duration_us: Floats
    delay_us: Floats
    change_bytes: Ints
    need_bytes: Ints
    limit_bytes: Ints


@njit(cache=True)
def _run(plan: _Plan) -> Ints:
    """The places in the plan in the order in which every device runs them."""
    devices, stages = len(plan.limit_bytes), plan.place.shape[1]
    end = np.full(plan.place.shape, np.inf)
    done = np.zeros(len(plan.kind), np.bool_)
    head, made = plan.first[:-1].copy(), plan.first[:-1].copy()
    order = np.empty(len(plan.kind), np.int64)
    count = np.zeros((3, stages), np.int64)
    memory, free_at = np.zeros(devices, np.int64), np.zeros(devices)
    device_of = np.empty(stages, np.int64)
    for d in range(devices):
        device_of[plan.stages_of[d]] = d
    wake = [(0.0, d) for d in range(devices)]
    while wake:
        now, d = heappop(wake)
        if head[d] == plan.first[d + 1] or now < free_at[d]:
            continue
        k = _choose(plan, d, now, end, done, head[d], count, memory[d])
        if k < 0:
            continue
        kind, s = plan.kind[k], plan.stage[k]
        free_at[d] = end[kind, s, plan.microbatch[k]] = now + plan.duration_us[kind, s]
        memory[d] += plan.change_bytes[kind, s]
        count[kind, s] += 1
        done[k] = True
        order[made[d]] = k
        made[d] += 1
        while head[d] < plan.first[d + 1] and done[head[d]]:
            head[d] += 1
        heappush(wake, (free_at[d], d))
        near = s + 1 if kind == F else s - 1
        if kind != W and 0 <= near < stages:
            ready = free_at[d] + plan.delay_us[kind, min(s, near)]
            heappush(wake, (max(ready, free_at[device_of[near]]), device_of[near]))
    return order


@njit(cache=True)
def _choose(
    plan: _Plan, d: int, now: float, end: Floats, done: NDArray[np.bool_], head: int, count: Ints, memory: int
) -> int:
    """The place of the pass to run now: by plan, once the forwards are done B before W; -1 where there is none."""
    total, microbatches = len(done), plan.place.shape[2]
    cool_down = True
    for s in plan.stages_of[d]:
        cool_down = cool_down and count[F, s] == microbatches
    tried = -1
    while True:
        rank, chosen = 2 * total, -1
        for kind in range(3):
            for s in plan.stages_of[d]:
                i = count[kind, s]
                if i == microbatches or not _is_ready(plan, kind, s, i, now, end):
                    continue
                k = plan.place[kind, s, i]
                its_rank = k + total if cool_down and kind == W else k
                if tried < its_rank < rank:
                    rank, chosen = its_rank, k
        if chosen < 0 or chosen == head or _fits(plan, d, chosen, done, head, memory):
            return chosen
        tried = rank


@njit(cache=True)
def _is_ready(plan: _Plan, kind: int, s: int, i: int, now: float, end: Floats) -> bool:
    """Whether the input of a pass has arrived."""
    if kind == W:
        return bool(end[B, s, i] < np.inf)
    if kind == F:
        return bool(s == 0 or end[F, s - 1, i] + plan.delay_us[0, s - 1] <= now)
    last = s + 1 == plan.place.shape[1]
    return bool(end[F, s, i] < np.inf and (last or end[B, s + 1, i] + plan.delay_us[1, s] <= now))


@njit(cache=True)
def _fits(plan: _Plan, d: int, early: int, done: NDArray[np.bool_], head: int, memory: int) -> bool:
    """Whether a pass has room now, and after it everything that is planned before it."""
    if memory + plan.need_bytes[plan.kind[early], plan.stage[early]] > plan.limit_bytes[d]:
        return False
    memory += plan.change_bytes[plan.kind[early], plan.stage[early]]
    for k in range(head, early):
        if done[k]:
            continue
        if memory + plan.need_bytes[plan.kind[k], plan.stage[k]] > plan.limit_bytes[d]:
            return False
        memory += plan.change_bytes[plan.kind[k], plan.stage[k]]
    return True
