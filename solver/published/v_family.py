"""V-Min, V-Half and V-ZB: schedules with controllable memory along a V (arXiv 2405.15362, sections 3 and 4).

A building block says when each pass of one microbatch runs, with F, B and W of a chunk one unit of time long. It is
repeated every six units, in which a device runs F, B and W of both its chunks. Along the devices every leg is a
straight line: a leg away from device 0 takes `out` units a device and a leg towards it `back` units,

    F going out: out * d,  F coming back: c1 - back * d,  B going out: c2 + out * d,  B coming back: c3 - back * d.

The two chunks of a device then live for 2 (out + back) (p - 1) units together, and some for turning round. So every
device holds about (out + back) p / 6 microbatches: a third of 1F1B's memory for V-Min, half for V-Half, all for V-ZB.

What repetition leaves idle at both ends is then filled: a device that would wait takes a later pass if that keeps its
peak, and once its forwards are done it takes B before W. The costs are the problem's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.memory import device_effect, effect_table
from optpipe.ops import OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import over_budget, peak_budgets
from solver.published.passes import require_v_shape

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


PERIOD = 6

Block = tuple[dict[tuple[str, int], int], ...]
"""For each device, the start of each of its passes, by kind and stage."""


def v_min(problem: Problem) -> Orders:
    """V-Min, the least memory: (p + 4) // 3 microbatches. Its block fits unit costs alone. Raises MethodError."""
    return _best(problem, "v-min", [(1, 1)])


def v_half(problem: Problem) -> Orders:
    """V-Half: (p + 2) // 2 microbatches, and no bubble that repeats for measured costs. Raises MethodError."""
    return _best(problem, "v-half", [(2, 1), (1, 2)])


def v_zb(problem: Problem, fill: bool = True) -> Orders:
    """V-ZB: p microbatches, as 1F1B, and next to no bubble. Raises MethodError on placement.

    `fill`: False leaves idle what repetition leaves idle at both ends, and needs no kernel.
    """
    return _best(problem, "v-zb", [(3, 3)], fill)


def _best(problem: Problem, method: str, slopes: list[tuple[int, int]], fill: bool = True) -> Orders:
    """The best of the blocks with these slopes, as they are, and with their ends filled at unit or real costs.

    Filling takes most of the time and keeps the peak: what exceeds a budget is not filled.
    """
    require_v_shape(problem, method)
    plans = [_repeated(problem, building_block(len(problem.devices), out, back)) for out, back in slopes]
    unfilled = [Orders.of_compute(plan) for plan in plans]
    fitting = [k for k, orders in enumerate(unfilled) if not over_budget(problem, orders)]
    candidates = [unfilled[k] for k in fitting] or unfilled
    if fill:
        candidates += [filled(problem, plans[k], unit_costs) for k in fitting for unit_costs in (True, False)]
    return min(candidates, key=lambda orders: simulate(problem, orders).value_us)


@lru_cache(maxsize=64)
def building_block(p: int, out: int, back: int) -> Block:
    """The block of these slopes that holds the least memory, and of these the shortest.

    Where a leg ends and the next begins the microbatch may pause. Pauses of up to a period are tried: some are needed
    so that no device has two passes at a time.
    """
    blocks = [(sum(pauses), _block(p, out, back, pauses)) for pauses in product(range(PERIOD), repeat=3)]
    free_of_collisions = [(chunks_held(block), pause, k) for k, (pause, block) in enumerate(blocks) if block]
    return blocks[min(free_of_collisions)[2]][1]


def _block(p: int, out: int, back: int, pauses: tuple[int, ...]) -> Block:
    """The block with these pauses at the three turns; empty where two passes of a device collide."""
    first_back = (p - 1) * (out + back) + 1 + pauses[0]
    first_out = first_back + 1 + pauses[1]
    last_back = first_out + (p - 1) * (out + back) + 1 + pauses[2]
    devices = []
    for d in range(p):
        there, here = d, 2 * p - 1 - d
        starts = {
            ("F", there): out * d,
            ("F", here): first_back - back * d,
            ("B", here): first_out + out * d,
            ("B", there): last_back - back * d,
        }
        free = sorted(set(range(PERIOD)) - {start % PERIOD for start in starts.values()})
        if len(free) != 2:
            return ()
        devices.append(starts | _weights(starts["B", there], starts["B", here], there, here, free))
    return tuple(devices)


def _weights(b_there: int, b_here: int, there: int, here: int, free: list[int]) -> dict[tuple[str, int], int]:
    """Both W in the two slots of the period that are free, as soon as can be after their B."""
    ways = []
    for slot_there, slot_here in (free, reversed(free)):
        after = 1 + (slot_there - b_there - 1) % PERIOD, 1 + (slot_here - b_here - 1) % PERIOD
        ways.append((sum(after), {("W", there): b_there + after[0], ("W", here): b_here + after[1]}))
    return min(ways, key=lambda way: way[0])[1]


def chunks_held(block: Block) -> int:
    """The most chunks that a device holds at any time once the block repeats, from the start of F to the end of W."""
    most = 0
    for starts in block:
        lives = [(start, starts["W", stage] + 1) for (kind, stage), start in starts.items() if kind == "F"]
        for now, _ in lives:
            held = sum((now - begin) // PERIOD - (now - end) // PERIOD for begin, end in lives)
            most = max(most, held)
    return most


def _repeated(problem: Problem, block: Block) -> list[OpArray]:
    """The block once for each microbatch: the passes of each device in the order of their starts."""
    microbatches = np.arange(problem.microbatches)
    orders = []
    for starts in block:
        kind, stage = np.array([("FBW".index(kind), stage) for kind, stage in starts]).T
        at = np.array(list(starts.values()))[:, None] + PERIOD * microbatches
        order = np.argsort(at, axis=None)
        row, microbatch = np.divmod(order, len(microbatches))
        orders.append(OpArray(kind[row], stage[row], microbatch))
    return orders
