"""Bounds from dynamic programming over states of progress: the F and B that are done, and when more can start.

A schedule is a sequence of F and B in the order of their starts. A prefix of it matters only by the progress of every
microbatch, the time at which each device is free and the next op of each microbatch can start, and the time that the
devices have had for W. Of two prefixes with the same progress, one that is later in no time dominates the other; so
states are kept instead of sequences. W are only counted: as many as have had time so far have run and freed memory.
That is exact where the W of a device are alike, and a relaxation elsewhere. That copies take no time is a relaxation as
well (docs/math/bounds.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from math import floor, gcd
from typing import NamedTuple

import numpy as np
from numba import njit

from optpipe.ops import Bools, Ints, Op, Orders
from optpipe.problem import Problem
from optpipe.stage import exact
from solver.bounds.device import usable_bytes
from solver.bounds.lower_bound import lower_bound_us
from solver.bounds.unit_costs import UnitCosts
from solver.bounds.unit_order import op_times
from solver.build import orders_from_times
from solver.exact.memory_order import memory_precedences
from solver.limits import Limits
from solver.scale import MAX_STEPS, horizon_us, time_unit_us

MOST_STATES = 8_000
"""Most states kept with the same number of ops begun; where there are more, a smaller value is tried."""

STATES_A_UNIT = 400_000
"""States that are expanded in about a second, the unit of deterministic limits."""


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
def _successors(states: States, tables: Tables, ends: Ends, limit: int, most: int) -> tuple[States, Ints, int]:
    """States after one more op that can still end by `limit`.

    Also returns, for each, the row of the state that it follows, the microbatch of its last op and the start of that
    op; and the least value that those left out could have, NEVER if none is. Stops once there are more than `most`.
    """
    count, microbatches = states.done.shape
    devices, ops = states.free.shape[1], len(tables.length)
    room, size, beyond = max(1024, 2 * count), 0, NEVER
    done, ready = np.empty((room, microbatches), np.int64), np.empty((room, microbatches), np.int64)
    free, debt = np.empty((room, devices), np.int64), np.empty((room, devices), np.int64)
    steps = np.empty((room, 3), np.int64)
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
                        steps[size, 0], steps[size, 1], steps[size, 2] = a, j, at
                        size += 1
                if least > limit:
                    beyond = min(beyond, least)
                if later == start:
                    break
            if k == 0:
                break
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
    least = 0
    for e in range(len(free)):
        if e == d or free[e] < start:
            free[e] = max(free[e], start)
            debt[e] = max(debt[e], start - _pending(done, e, tables))
    debt[d] += (start - debt[d]) % tables.weight_step[d] + tables.length[k]
    free[d] = start + tables.length[k]
    done[j] += 1
    ready[j] = free[d] + tables.delay[k]
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
            ready[i] = 0
            continue
        at = free[tables.device[k]]
        if k > 0:
            at = ready[i] = max(at, ready[i])
        least = max(least, at + tables.length[k] + ends.tail[k, i])
        if k == 0:
            break
    return least


@njit(cache=True, nogil=True)
def undominated(rows: Ints, times: int) -> Ints:
    """Indices of the states that no other with the same progress dominates; of equal ones the first.

    Columns before `times` hold the progress of a state, the others its times.
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
            b = kept[other]
            dominated = True
            for m in range(columns):
                if rows[b, m] > rows[a, m] or (m < times and rows[b, m] != rows[a, m]):
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


def handles_states(problem: Problem) -> bool:
    """True for equal microbatches without modes, and times that are whole ticks."""
    if problem.has_factors or problem.slice_count > 1 or problem.has_modes:
        return False
    return horizon_us(problem, float("inf")) / time_unit_us(problem) < MAX_STEPS


DOLL = 0.3
"""Largest share of the time or work left that each number of the last microbatches may take."""


LEAST_SHARE = 1000
"""Fewest states that are worth the start of another thread."""


class Dolls:
    """Lower bounds in ticks for the last 1, 2, ... microbatches, from the start of the first F of them.

    Those of a `whole` problem, if one is given, by a part of it with the stages `kept`, the others as delays.

    `known`: such bounds from elsewhere, by the number of microbatches. `is_reached`: the last one is the least value
    itself; for a part, the least that it can say with the tails of the whole.
    """

    def __init__(
        self, problem: Problem, limits: Limits, whole: Problem | None = None, kept: Sequence[int] = ()
    ) -> None:
        self.problem, self.limits = problem, limits
        self.unit_us = time_unit_us(whole or problem)  # of all ops: tails are those of the whole
        self.tables = _tables(problem, self.unit_us)
        self.weight_ticks = [int(exact(stage.backward_weight_us) / self.unit_us) for stage in problem.stages]
        self.tails = self._tails(problem)
        if whole is not None and self.tails is not None and (tails := self._tails(whole)) is not None:
            rows = [*kept, *(len(tails) - 1 - s for s in reversed(kept))]
            self.tails = np.maximum(self.tails, tails[rows])
        self.forced = self._forced()
        self.least = [0]
        self.is_reached = False
        self.known = [0] * (problem.microbatches + 1)
        counted = limits.deterministic_limit
        self.states_left = float("inf") if counted is None else STATES_A_UNIT * counted

    def _tails(self, problem: Problem) -> Ints | None:
        """The least time in ticks that follows each op, by its place on the way and microbatch; None: no schedule."""
        times = op_times(UnitCosts.of(problem))
        if times is None:
            return None
        tails_us = np.concatenate([times.forward_tails, times.backward_tails[::-1]])
        return np.floor(tails_us / float(self.unit_us) + 1e-6).astype(np.int64)

    def _forced(self) -> Sequence[Sequence[tuple[int, int, int]]]:
        """What memory forces to follow each op: the op, by how many microbatches later, and the ticks between them.

        Those of a W are between the end of its B and the op that waits for it.
        """
        ops, forced = len(self.tables.length), set()
        for before, after in memory_precedences(self.problem):
            ticks = self.weight_ticks[before.stage] if before.kind == "W" else 0
            first, second = (op.stage if op.kind == "F" else ops - 1 - op.stage for op in (before, after))
            forced.add((first, second, after.microbatch - before.microbatch, ticks))
        return [[entry[1:] for entry in forced if entry[0] == k] for k in range(ops)]

    def bounds(self, highest: int) -> Iterator[int]:
        """Yield ever larger lower bounds for all microbatches, after those for the last 1, 2, ... of them."""
        for count in range(1, self.problem.microbatches):
            for _ in self._climb(count, highest, DOLL):
                pass
        yield from self._climb(self.problem.microbatches, highest, 1.0)

    def _climb(self, count: int, highest: int, share: float) -> Iterator[int]:
        """Yield ever larger lower bounds for the last `count` microbatches, until one is above `highest`.

        Ends at the least value itself, where there are too many states, or when this share of what is left is spent.
        """
        is_over, self.is_reached = self._over(share), False
        ends, proved = self._ends(count), max(self.least[-1], self.known[count])
        if count == self.problem.microbatches or self.problem.objective == "makespan":
            # Not for fewer microbatches and spans, as the largest may be that of another device.
            own = {"microbatches": count, "microbatch_factors": None}  # all of them are 1, if there are any
            bound_us = lower_bound_us(Problem.from_data(self.problem.to_data() | own))
            proved = max(proved, floor(bound_us * (1 - 1e-11) / self.unit_us))
        self.least.append(proved)
        stride, refused = max(proved // 512, 1), highest + 1
        limit = min(proved, highest)
        while ends is not None and limit < refused:
            answered = self._ask(count, limit, ends, is_over)
            if answered is None and (count < self.problem.microbatches or is_over()):
                return
            if answered is None:
                refused, stride = limit, stride // 4
                limit = proved + min((refused - proved) // 4, stride)
                continue
            proved, is_least = max(answered[0], self.least[count]), answered[1]
            self.least[count] = proved
            yield proved
            self.is_reached = is_least
            if is_least or proved > highest:
                return
            stride *= 2
            limit = min(proved + stride, refused - 1)

    def _over(self, share: float) -> Callable[[], bool]:
        """A function that is True once this share of the time or work that is left now has been spent."""
        limits, kept = self.limits.part(share), self.states_left * (1 - share)
        if limits.deterministic_limit is not None:
            return lambda: limits.cancel.requested or self.states_left <= kept
        return lambda: limits.cancel.requested or limits.seconds >= limits.time_limit_s

    def _ask(self, count: int, limit: int, ends: Ends, is_over: Callable[[], bool]) -> tuple[int, bool] | None:
        """The least value if it is at most `limit`, and True; a larger bound, and False; None where it is not known."""
        ops, devices = len(self.tables.length), len(self.problem.devices)
        sizes = (1, count), (1, count), (1, devices), (1, devices)
        states, least = States(*(np.zeros(size, np.int64) for size in sizes)), NEVER
        self.layers: list[Ints] = []
        for _ in range(ops * count):
            states, steps, beyond = self._step(states, ends, limit)
            self.states_left -= len(states.done)
            least = min(least, beyond)
            if not len(states.done):
                return (max(least, limit + 1), False) if least < NEVER else None
            if len(states.done) <= 8 * MOST_STATES:
                kept = undominated(np.concatenate(states, axis=1), count)
                states, steps = States(*(rows[kept] for rows in states)), steps[kept]
            self.layers.append(steps)
            if len(states.done) > MOST_STATES or is_over():
                return None
        ends_at = np.where(ends.counted, states.debt + ends.weights, 0)
        self.last = int(ends_at.max(axis=1).argmin())
        return int(ends_at.max(axis=1).min()), True

    def _step(self, states: States, ends: Ends, limit: int) -> tuple[States, Ints, int]:
        """`_successors`, on as many cores as the search may use."""
        count = len(states.done)
        shares = min(self.limits.workers, count // LEAST_SHARE)
        if shares <= 1:
            return _successors(states, self.tables, ends, limit, 8 * MOST_STATES)
        rows = [slice(count * n // shares, count * (n + 1) // shares) for n in range(shares)]

        def of_share(part: slice) -> tuple[States, Ints, int]:
            states_of_part = States(*(values[part] for values in states))
            # Each may have as many as all together, so that one that stops early always makes them too many.
            found, steps, beyond = _successors(states_of_part, self.tables, ends, limit, 8 * MOST_STATES)
            steps[:, 0] += part.start
            return found, steps, beyond

        with ThreadPoolExecutor(shares) as pool:
            found = list(pool.map(of_share, rows))
        all_states = States(*(np.concatenate(values) for values in zip(*(one[0] for one in found), strict=True)))
        return all_states, np.concatenate([one[1] for one in found]), min(one[2] for one in found)

    def orders(self) -> Orders:
        """Orders of the least value that was reached: W in the gaps where they were counted, as far as they fit whole.

        They keep the budgets, and reach that value, where no activation has to leave and W of a device are alike.
        """
        problem, stages = self.problem, len(self.problem.stages)
        path, row = [], self.last
        for steps in reversed(self.layers):
            row, i, start = steps[row].tolist()
            path.append((start, i))
        planned: dict[Op, tuple[int, int]] = {}
        free, pending = [0] * len(problem.devices), [deque[Op]() for _ in problem.devices]
        ran = [0] * problem.microbatches

        def run_weights(d: int, until: float) -> None:
            while pending[d] and free[d] + (ticks := self.weight_ticks[pending[d][0].stage]) <= until:
                planned[pending[d].popleft()] = free[d], free[d] + ticks
                free[d] += ticks

        for start, i in reversed(path):
            k = ran[i]
            ran[i] += 1
            s = k if k < stages else 2 * stages - 1 - k
            backward = "B" if problem.stages[s].split_backward else "BW"
            op, d = Op("F" if k < stages else backward, s, i), problem.stages[s].device
            run_weights(d, start)
            free[d] = start + int(self.tables.length[k])
            planned[op] = start, free[d]
            if op.kind == "B":
                pending[d].append(Op("W", op.stage, i))
        for d in range(len(problem.devices)):
            run_weights(d, float("inf"))
        return orders_from_times(problem, planned)

    def _ends(self, count: int) -> Ends | None:
        """Lower bounds on what follows each op of the last microbatches; None where no schedule keeps the budgets."""
        if self.tails is None:
            return None
        problem, length = self.problem, self.tables.length
        tail = self.tails[:, problem.microbatches - count :].copy()
        tail[0, 1:] = np.maximum(tail[0, 1:], np.array(self.least[count - 1 : 0 : -1]) - length[0])
        for i in reversed(range(count)):
            for k in reversed(range(len(length))):
                later = [tail[k, i]]
                if k + 1 < len(length):
                    later.append(self.tables.delay[k] + length[k + 1] + tail[k + 1, i])
                if i + 1 < count:
                    later.append(length[k] + tail[k, i + 1])
                for other, apart, ticks in self.forced[k]:
                    if i + apart < count:
                        later.append(ticks + length[other] + tail[other, i + apart])
                tail[k, i] = max(later)
        weights, last_tail = np.zeros(len(problem.devices), np.int64), np.zeros(len(problem.devices), np.int64)
        for d, numbers in enumerate(problem.stages_of):
            if numbers:
                weights[d] = self.tables.weights[len(length), d] * count
                last_tail[d] = tail[len(length) - 1 - numbers[0], -1]
        spans = problem.objective == "device_span"
        counted = np.array([not spans or d == problem.stages[0].device for d in range(len(problem.devices))])
        return Ends(tail, last_tail, weights, counted)


def _tables(problem: Problem, unit_us: Fraction) -> Tables:
    """Costs by op and by number of ops done."""
    stages, ops, devices = problem.stages, 2 * len(problem.stages), len(problem.devices)

    def ticks(times_us: Iterable[float]) -> Ints:
        return np.array([int(exact(time_us) / unit_us) for time_us in times_us], np.int64)

    costs = UnitCosts.of(problem)
    sizes = (costs.whole, costs.staying, costs.beside, costs.left)
    whole, staying, beside, left = (of_unit[:, 0].astype(np.int64) for of_unit in sizes)
    forward, backward, weight = (ticks(us[:, 0].tolist()) for us in (costs.forward, costs.backward, costs.weight))
    pending = np.minimum(whole, left)
    way = [*range(len(stages)), *reversed(range(len(stages)))]
    device = np.array([stages[s].device for s in way], np.int64)
    length = np.concatenate([forward, backward[::-1]])
    needed = np.full(ops, -NEVER // 2, np.int64)
    for s, stage in enumerate(stages):
        budget = usable_bytes(problem, stage.device)
        if budget < float("inf"):
            needed[s] = whole[s] + beside[s] - int(budget)
    by_done = [np.zeros((ops + 1, devices), np.int64) for _ in range(3)]
    held, weights, to_run = by_done
    for k in range(ops + 1):
        for s, stage in enumerate(stages):
            if k >= ops - s:
                held[k, stage.device] += pending[s]
                weights[k, stage.device] += weight[s]
            elif k > s:
                held[k, stage.device] += staying[s]
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
