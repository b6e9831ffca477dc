"""States of progress: the F and B that have begun, and when more can start.

A schedule is a sequence of F and B in the order of their starts. A prefix of it matters only by the progress of every
microbatch, the time at which each device is free and the next op of each microbatch can start, and the time that the
devices have had for W. Of two prefixes with the same progress, one that is later in no time dominates the other; so
states are kept instead of sequences. W are only counted: as many as have had time so far have run and freed memory.
That is exact where the W of a device are alike, and a relaxation elsewhere. That copies take no time is a relaxation as
well (docs/math/bounds.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import gcd
from typing import NamedTuple

import numpy as np
from numba import njit

from optpipe.ops import Bools, Ints
from optpipe.problem import Problem
from optpipe.stage import exact
from optpipe.task_graph import lower
from solver.bounds.device import usable_bytes
from solver.bounds.unit_costs import UnitCosts


class States(NamedTuple):
    """States, one a row: ops done of each microbatch, and times in ticks.

    `done` (states, microbatches): along the way of a microbatch, F of all stages and B of all stages back. `ready`
    (same shape): the earliest start of its next op. `free` (states, devices): the end of the last op begun there.
    `debt`: that less the time spent on W by then; so a device that did nothing else would have run W of `x` ticks at
    `debt + x`.
    """

    done: Ints
    ready: Ints
    free: Ints
    debt: Ints


class Tables(NamedTuple):
    """Costs of the ops on a microbatch's way, F of all stages and B of all stages back; times in ticks.

    `length`, `delay` (to the next op), `device`: by op. `needed`: bytes of an F beside the budget of its device, which
    is subtracted. By ops done and device: `held` are the bytes that a microbatch holds there while none of its W has
    run, `weights` the time of W whose B is done, `left` the time of F and B that are still to run. By device and rank,
    the least time for each byte first: `weight_ticks`, `weight_bytes`, `weight_from` (the ops done from which that W is
    pending); `ranks` of them a device. `weight_step`: of each device the ticks of which all its W are multiples.
    """

    length: Ints
    delay: Ints
    device: Ints
    needed: Ints
    held: Ints
    weights: Ints
    left: Ints
    weight_ticks: Ints
    weight_bytes: Ints
    weight_from: Ints
    ranks: Ints
    weight_step: Ints


class Ends(NamedTuple):
    """Lower bounds on the time that follows an op, in ticks.

    `tail` (ops, microbatches): from its end to the end of all. `last_tail`: the tail of the last backward of each
    device. `weights`: time of all W of a device. `counted`: True for the devices whose end counts for the value.
    """

    tail: Ints
    last_tail: Ints
    weights: Ints
    counted: Bools


NEVER = 2**62
"""Beyond every time."""


@njit(cache=True, nogil=True)
def successors(states: States, tables: Tables, ends: Ends, limit: int, most: int) -> tuple[States, Ints, int]:
    """States after one more op that can still end by `limit`.

    Also returns, for each, the row of the state that it follows, the microbatch of its last op, the start of that op,
    and the least value that it can have; and the least value that those left out could have, NEVER if none is. Stops
    once there are more than `most`.
    """
    count, microbatches = states.done.shape
    devices, ops = states.free.shape[1], len(tables.length)
    room, size, beyond = max(1024, 2 * count), 0, NEVER
    done, ready = np.empty((room, microbatches), np.int64), np.empty((room, microbatches), np.int64)
    free, debt = np.empty((room, devices), np.int64), np.empty((room, devices), np.int64)
    steps = np.empty((room, 4), np.int64)
    for a in range(count):
        if size > most:
            break
        for j in range(microbatches):
            k = states.done[a, j]
            if k == ops or (j > 0 and states.done[a, j - 1] <= k):
                if k == 0:
                    break
                continue
            d = tables.device[k]
            start = max(states.free[a, d], states.ready[a, j])
            if 2 * k < ops:
                start = max(start, _room_at(states.done[a], k, d, states.debt[a, d], tables))
            if start >= NEVER // 2:
                if k == 0:
                    break
                continue
            # At once, or when the W that is running then has ended.
            spent = start - states.debt[a, d]
            later = start + (-spent) % tables.weight_step[d]
            if later > start and spent >= _pending(states.done[a], d, tables):
                later = start
            for at in (start, later):
                least = at + tables.length[k] + ends.tail[k, j]
                if least <= limit:
                    if size == room:
                        room *= 2
                        done, ready = longer(done, room), longer(ready, room)
                        free, debt, steps = longer(free, room), longer(debt, room), longer(steps, room)
                    done[size], ready[size] = states.done[a], states.ready[a]
                    free[size], debt[size] = states.free[a], states.debt[a]
                    least = _run(done[size], ready[size], free[size], debt[size], j, at, tables, ends)
                    if least <= limit:
                        steps[size, 0], steps[size, 1], steps[size, 2], steps[size, 3] = a, j, at, least
                        size += 1
                if least > limit:
                    beyond = min(beyond, least)
                if later == start:
                    break
            if k == 0:
                break
    if beyond >= NEVER // 2:  # F that never have room
        beyond = NEVER
    return States(done[:size], ready[:size], free[:size], debt[:size]), steps[:size], beyond


@njit(cache=True, nogil=True)
def longer(rows: Ints, room: int) -> Ints:
    """A copy of the rows with room for more."""
    copy = np.empty((room, rows.shape[1]), np.int64)
    copy[: len(rows)] = rows
    return copy


@njit(cache=True, nogil=True)
def _room_at(done: Ints, k: int, d: int, debt: int, tables: Tables) -> int:
    """The earliest time at which op k, an F, fits on device d: after W that free enough; NEVER // 2 if none do."""
    excess = tables.needed[k]
    for ops_done in done:
        excess += tables.held[ops_done, d]
    if excess <= 0:
        return 0
    work = 0
    for rank in range(tables.ranks[d]):
        pending = 0
        for ops_done in done:
            pending += ops_done >= tables.weight_from[d, rank]
        freed = pending * tables.weight_bytes[d, rank]
        if freed >= excess:
            work -= -tables.weight_ticks[d, rank] * excess // tables.weight_bytes[d, rank]
            room_at: int = debt + work + -work % tables.weight_step[d]
            return room_at
        work += pending * tables.weight_ticks[d, rank]
        excess -= freed
    return NEVER // 2


@njit(cache=True, nogil=True)
def _pending(done: Ints, d: int, tables: Tables) -> int:
    """The time of all W of device d whose B is done."""
    ticks = 0
    for ops_done in done:
        ticks += tables.weights[ops_done, d]
    return ticks


@njit(cache=True, nogil=True)
def _run(done: Ints, ready: Ints, free: Ints, debt: Ints, j: int, start: int, tables: Tables, ends: Ends) -> int:
    """Run the next op of microbatch j; no other op starts before it from then on. Returns the least value after it."""
    k = done[j]
    d = tables.device[k]
    for e in range(len(free)):
        if e == d or free[e] < start:
            free[e] = max(free[e], start)
            debt[e] = max(debt[e], start - _pending(done, e, tables))
    debt[d] += (start - debt[d]) % tables.weight_step[d] + tables.length[k]
    free[d] = start + tables.length[k]
    done[j] += 1
    ready[j] = free[d] + tables.delay[k]
    least = 0
    for e in range(len(free)):
        left = 0
        for ops_done in done:
            left += tables.left[ops_done, e]
        if left > 0:
            least = max(least, free[e] + left + ends.last_tail[e])
        if ends.counted[e]:
            least = max(least, debt[e] + left + ends.weights[e])
    for i in range(len(done)):
        k = done[i]
        if k == len(tables.length):
            ready[i] = 0  # the same in all states, so that it keeps none from dominating another
            continue
        at = free[tables.device[k]]
        if k > 0:
            at = ready[i] = max(at, ready[i])
        least = max(least, at + tables.length[k] + ends.tail[k, i])
        if k == 0:
            break  # of those that have not begun, the first stands for all
    return least


@njit(cache=True, nogil=True)
def undominated(rows: Ints, times: int) -> Ints:
    """Indices of the states that no other with the same progress dominates; of equal ones the first.

    Columns: progress, and from `times` on times. A state that dominates another has the same progress and no time
    later.
    """
    count, columns = rows.shape
    keys, sums = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for a in range(count):
        for m in range(times):
            keys[a] = keys[a] * MIXING + rows[a, m]  # modulo 2**64: others may have the same key
        sums[a] = rows[a, times:].sum()
    by_sum = np.argsort(sums, kind="mergesort")  # none dominates another with a smaller sum
    order = by_sum[np.argsort(keys[by_sum], kind="mergesort")]
    kept, size, group = np.empty(count, np.int64), 0, 0
    for n in range(count):
        a = order[n]
        if n == 0 or keys[a] != keys[order[n - 1]]:
            group = size
        dominated = False
        for other in range(max(group, size - MOST_COMPARED), size):
            row, dominated = rows[kept[other]], True
            for m in range(columns - 1, -1, -1):  # times first: they are most likely to differ
                if row[m] > rows[a, m] if m >= times else row[m] != rows[a, m]:
                    dominated = False
                    break
            if dominated:
                break
        if not dominated:
            kept[size] = a
            size += 1
    return kept[:size]


MIXING = 6364136223846793005
"""An odd factor that spreads the progress of microbatches over 64 bits."""

MOST_COMPARED = 500
"""Most kept states of the same progress that another one is compared with."""


def build_tables(problem: Problem, unit_us: Fraction) -> Tables:
    """Costs by op and by number of ops done, in ticks of `unit_us`."""
    home = lower(problem).device.tolist()
    stages, ops, devices = len(home), 2 * len(home), len(problem.devices)

    def ticks(times_us: Iterable[float]) -> Ints:
        return np.array([int(exact(time_us) / unit_us) for time_us in times_us], np.int64)

    costs = UnitCosts.of(problem)
    sizes = (costs.whole, costs.staying, costs.beside, costs.left)
    whole, staying, beside, left = (of_unit[:, 0].astype(np.int64) for of_unit in sizes)
    forward, backward, weight = (ticks(us[:, 0].tolist()) for us in (costs.forward, costs.backward, costs.weight))
    pending = np.minimum(whole, left)
    device = np.array([*home, *reversed(home)], np.int64)
    length = np.concatenate([forward, backward[::-1]])
    needed = np.full(ops, -NEVER // 2, np.int64)
    for s in range(stages):
        budget = usable_bytes(problem, home[s])
        if budget < float("inf"):
            needed[s] = whole[s] + beside[s] - int(budget)
    by_done = [np.zeros((ops + 1, devices), np.int64) for _ in range(3)]
    held, weights, to_run = by_done
    for k in range(ops + 1):
        for s, d in enumerate(home):
            if k >= ops - s:
                held[k, d] += pending[s]
                weights[k, d] += weight[s]
            elif k > s:
                held[k, d] += staying[s]
        np.add.at(to_run[k], device[k:], length[k:])
    ranked = [
        sorted((s for s in numbers if pending[s]), key=lambda s: weight[s] / pending[s])
        for numbers in problem.stages_of
    ]
    size = devices, max(map(len, ranked))
    weight_ticks, weight_bytes, weight_from = (np.zeros(size, np.int64) for _ in range(3))
    for d, numbers in enumerate(ranked):
        weight_ticks[d, : len(numbers)] = weight[numbers]
        weight_bytes[d, : len(numbers)] = pending[numbers]
        weight_from[d, : len(numbers)] = [ops - s for s in numbers]
    delay = ticks([*problem.forward_delay_us, 0, *reversed(problem.backward_delay_us), 0])
    ranks = np.array([len(numbers) for numbers in ranked], np.int64)
    step = np.array([gcd(*weight[list(numbers)].tolist()) or 1 for numbers in problem.stages_of], np.int64)
    return Tables(
        length, delay, device, needed, held, weights, to_run, weight_ticks, weight_bytes, weight_from, ranks, step
    )
