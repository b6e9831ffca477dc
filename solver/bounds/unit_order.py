"""Bounds from the order of units: what rules and memory chain together over all devices (docs/math/bounds.md).

On a device F runs in the order of the units and backwards in theirs, so what is in flight when an F starts is known
from the number of backwards done. Where that many units do not fit, a backward comes before the F. Longest paths
through all such precedences give every op a head, the time before it, and a tail, the time after it; and one device
that runs ops with heads and tails one at a time takes at least as long as if it could interrupt them (Carlier 1982).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, nlargest
from itertools import groupby
from typing import NamedTuple

import numpy as np

from optpipe.problem import Floats, Ints, Problem
from solver.bounds.device import ended_before, usable_bytes
from solver.bounds.unit_costs import LARGEST_SUM, UnitCosts
from solver.bounds.unit_room import InFlight, Waiting, room_us, tail_room_us
from solver.bounds.unit_work import OneStage, sums

MOST_NODES = 200_000
"""F and B of all stages up to which paths are followed: a second."""

MOST_WORK_NODES = 8_000
"""F and B up to which the work of devices between two ops counts as well: half a second."""

MOST_RELEASE_NODES = 12_500
"""F and B up to which all releases of a device are counted together: half a second."""

MOST_ROOM_NODES = 2_000
"""F and B up to which copies are counted one by one, and the room that later microbatches leave: half a second."""

MOST_IN_FLIGHT = 128
"""Microbatches before that of an F whose releases it may wait for, at most; what older ones hold is not counted."""

MOST_BEFORE_ROOM = 24
"""Backwards from which on the work of a device before an F that waits for room is counted: those that begin last."""


def ordered_bounds_us(costs: UnitCosts) -> Sequence[float]:
    """The longest path, and for each device its ops between their heads and tails; the order of units is given.

    For spans only what begins and ends on the device of stage 0 counts.
    """
    if costs.forward.size * 2 > MOST_NODES:
        return []
    paths = _Paths(costs)
    if not paths.follow():
        return []  # memory orders ops in a cycle: nothing keeps the budgets
    stages_of = costs.problem.stages_of
    devices = [costs.problem.stages[0].device] if costs.problem.objective == "device_span" else range(len(stages_of))
    return [paths.one_machine_us(stages_of[d]) for d in devices if stages_of[d]]


class OpTimes(NamedTuple):
    """Least times (us) before each F and B, and from its end to the end of all: arrays (stages, units).

    In every schedule of which the first F begins at 0. For spans the end of all is that of the device of stage 0.
    `*_to_go`: from the end of each to that of the last B of stage 0.
    """

    forward_heads: Floats
    backward_heads: Floats
    forward_tails: Floats
    backward_tails: Floats
    forward_to_go: Floats
    backward_to_go: Floats


def op_times(costs: UnitCosts) -> OpTimes | None:
    """Heads and tails of all ops; the order of units is given. None where they are too many, or no schedule is."""
    if costs.forward.size * 2 > MOST_NODES:
        return None
    paths = _Paths(costs)
    if not paths.follow():
        return None
    lists = [paths.forward_heads, paths.backward_heads, paths.forward_tails, paths.backward_tails]
    paths.follow_tails(to_last_backward=True)
    return OpTimes(*(np.array(values) for values in (*lists, paths.forward_tails, paths.backward_tails)))


class _Held(NamedTuple):
    """Precedences that memory forces between F of a stage and backwards of a stage of its device.

    `released[x]`: the number of backwards of stage t that have ended when F of unit x starts.
    """

    t: int
    released: Ints


class _Release(NamedTuple):
    """Releases of a unit: by B at its end, which is at `ends_us` the earliest, and by W after that.

    `pieces`: the least time for each byte that B and W free, and the bytes, such as lie on the lower hull of both.
    """

    head_us: float
    ends_us: float
    weight_us: float
    by_backward: float
    by_weight: float
    pieces: Sequence[tuple[float, float]]

    @property
    def size(self) -> float:
        """Bytes that both free."""
        return self.by_backward + self.by_weight


class _Levels(NamedTuple):
    """Bytes on a device when F of a stage starts, and its budget.

    `excess[x]`: the bytes by which the budget would be exceeded at F of unit x if nothing had been released.
    `begun[t]`: for each stage of the device how many units of microbatches before that of x have begun F there by then,
    at least. No more than `fitting` microbatches fit, each with the least that any unit holds on the lowest stage.
    """

    excess: Sequence[float]
    begun: dict[int, Sequence[int]]
    fitting: int


class _Device(NamedTuple):
    """Stages of a device, its usable bytes, and the least times of copies that take anything out and back."""

    numbers: Sequence[int]
    budget: float
    offload_us: float
    reload_us: float


def from_stage(problem: Problem, low: int) -> Problem:
    """The pipeline of the stages from `low` on; what its schedules need, those of the whole problem need as well.

    It has no spread passes and gates, which name stages of the whole one.
    """
    transfer = problem.transfer_us
    return problem.replaced(
        stages=problem.stages[low:],
        transfer_us=transfer[low:] if isinstance(transfer, list) else transfer,
        spread=None,
        gates=None,
    )


class _Paths:
    """Heads and tails of F and B of every unit on every stage, in lists by stage and unit."""

    def __init__(self, costs: UnitCosts) -> None:
        self.costs, self.problem = costs, costs.problem
        self.stages, self.units = costs.forward.shape
        self.count = self.problem.slice_count
        self.back = costs.backward_order.tolist()
        self.f, self.b, self.w = (us.tolist() for us in (costs.forward, costs.backward, costs.weight))
        self.delays = {direction: us.tolist() for direction, us in self.problem.unit_delays_us.items()}
        self.held: dict[int, list[_Held]] = defaultdict(list)
        self.alone: dict[int, OneStage] = {}
        self.levels: dict[int, _Levels] = {}
        self.devices: dict[int, _Device] = {}  # by stage, those of which the room is counted unit by unit
        self.whole, self.moved = costs.whole.tolist(), (costs.whole - costs.staying).tolist()
        self.left = np.minimum(costs.left, costs.whole).tolist()
        self.counts_work = costs.forward.size * 2 <= MOST_WORK_NODES
        by_weight = np.minimum(costs.staying, costs.left)
        self.by_backward, self.by_weight = (costs.staying - by_weight).tolist(), by_weight.tolist()
        self.staying_sums = [sums(sizes).tolist() for sizes in costs.staying]
        self.forward_sums = [sums(times_us).tolist() for times_us in costs.forward]
        for d, numbers in enumerate(self.problem.stages_of):
            budget = usable_bytes(self.problem, d)
            sizes = costs.whole[numbers].sum() + costs.beside[numbers].sum() + costs.left[numbers].sum()
            if numbers and budget < float("inf") and float(sizes) + budget < LARGEST_SUM:
                self._hold(numbers, float(budget))

    def _hold(self, numbers: Sequence[int], budget: float) -> None:
        """Record how many backwards must have ended before each F of a device, for their bytes to be free.

        Units that have begun F of stage t, and so of all earlier stages of the device, and have not ended B of t, hold
        what stays of these. When F of unit x on stage s starts, all units before x are such, but those whose B of t has
        ended, which come first in the order of the backwards.
        """
        staying = np.cumsum(self.costs.staying[numbers], axis=0)
        if self.costs.forward.size * 2 <= MOST_ROOM_NODES:
            moves = self.costs.whole[numbers] > self.costs.staying[numbers]
            copies_us = [times_us[numbers][moves] for times_us in (self.costs.offload, self.costs.reload)]
            least_us = [float(times_us.min()) if times_us.size else 0.0 for times_us in copies_us]
            self.devices |= dict.fromkeys(numbers, _Device(numbers, budget, *least_us))
        for k, s in enumerate(numbers):
            own = (staying[k - 1] if k else 0.0) + self.costs.whole[s] + self.costs.beside[s]
            if self.costs.forward.size * 2 <= MOST_RELEASE_NODES:
                self.levels[s] = self._levels(numbers, k, staying, budget)
            for j, t in enumerate(numbers[: k + 1]):
                self.held[s].append(_Held(t, ended_before(staying[j], budget - own, self.back)))
        if len(numbers) == 1 and self.costs.forward.size * 2 <= MOST_WORK_NODES:
            self.alone[numbers[0]] = OneStage(self.costs, numbers[0], budget, self.held[numbers[0]][0].released)

    def _levels(self, numbers: Sequence[int], k: int, staying: Floats, budget: float) -> _Levels:
        """Levels at F of the k-th stage of a device; `staying[k]` is what stays of a unit on its stages up to that.

        Were F of unit x begun before F of unit i < x on a later stage u, all from i + 1 to x would be between F and B
        of this stage when the latter starts. Where that does not fit, F of (u, i) comes first.
        """
        s, costs = numbers[k], self.costs
        microbatch = np.arange(self.units) // self.count * self.count
        held = np.cumsum(staying[k])
        excess = held - staying[k] + (staying[k - 1] if k else 0.0) + costs.whole[s] + costs.beside[s] - budget
        begun: dict[int, Sequence[int]] = dict.fromkeys(numbers[: k + 1], microbatch.tolist())
        for j, u in enumerate(numbers[k + 1 :], k + 1):
            fits = budget - staying[j - 1] - costs.whole[u] - costs.beside[u] + held
            first, counts = 0, []  # units that are sure to have begun F of u, in whole microbatches
            for x in range(self.units):
                forced = np.flatnonzero(fits[first : microbatch[x]] < held[x])
                first += (int(forced[-1]) + 1) // self.count * self.count if len(forced) else 0
                counts.append(first)
            begun[u] = counts
            excess += np.concatenate([[0.0], np.cumsum(costs.staying[u])])[counts]
        least = min((size for size in staying[0].tolist() if size), default=budget)
        return _Levels(excess.tolist(), begun, int(budget // max(least, 1)) + 1)

    def follow(self) -> bool:
        """All heads and tails; False where a backward would have to end before an F that it waits for."""
        first_of = np.arange(self.units) // self.count * self.count
        for held in (entry for entries in self.held.values() for entry in entries):
            if (held.released > first_of).any():  # of this microbatch or a later one, or more than there are
                return False
        self._follow_heads()
        self.follow_tails()
        return True

    def _follow_heads(self) -> None:
        f, b, back, n = self.f, self.b, self.back, self.count
        self.forward_heads = heads = [[0.0] * self.units for _ in range(self.stages)]
        self.backward_heads = backs = [[0.0] * self.units for _ in range(self.stages)]
        self.releases: list[list[_Release]] = [[] for _ in range(self.stages)]
        for first in range(0, self.units, n):
            own = range(first, first + n)
            for s in range(self.stages):
                for u in own:
                    ready = heads[s][u - 1] + f[s][u - 1] if u else 0.0
                    if s:
                        ready = max(ready, heads[s - 1][u] + f[s - 1][u] + self.delays["forward"][s - 1][u])
                    for t, released in self.held[s]:
                        if released[u]:
                            before = back[released[u] - 1]
                            ready = max(ready, backs[t][before] + b[t][before])
                    if s in self.alone:
                        ready = max(ready, self.alone[s].head_us(u, heads[s][0]))
                    if s in self.levels and self.levels[s].excess[u] > 0:
                        ready = max(ready, self._room_us(s, u, first))
                    if s in self.devices and s in self.levels:
                        ready = max(ready, self._copied_us(s, u, first, ready))
                    heads[s][u] = ready
            for s in reversed(range(self.stages)):
                for u in reversed(own):
                    ready = heads[s][u] + f[s][u]
                    place = 2 * first + n - 1 - u  # in the order of the backwards
                    if place:
                        ready = max(ready, backs[s][back[place - 1]] + b[s][back[place - 1]])
                    if s + 1 < self.stages:
                        ready = max(ready, backs[s + 1][u] + b[s + 1][u] + self.delays["backward"][s][u])
                    if s in self.alone:
                        ready = max(ready, self.alone[s].backward_head_us(place, first + n, heads[s][0]))
                        self.alone[s].backward_starts[place] = ready
                    backs[s][u] = ready
                    self.releases[s].append(self._release(s, u))

    def _release(self, s: int, u: int) -> _Release:
        """Bytes that B and W of unit u on stage s free, by the head of that B."""
        backward_us, weight_us = self.b[s][u], self.w[s][u]
        by_backward, by_weight = self.by_backward[s][u], self.by_weight[s][u]
        head_us, size = self.backward_heads[s][u], by_backward + by_weight
        pieces: list[tuple[float, float]] = []
        if by_backward and (not by_weight or backward_us * by_weight <= weight_us * by_backward):
            pieces = [(backward_us / by_backward, by_backward)]
            pieces += [(weight_us / by_weight, by_weight)] if by_weight else []
        elif size:  # W frees more a time than the B that it has to wait for: both in one
            pieces = [((backward_us + weight_us) / size, size)]
        return _Release(head_us, head_us + backward_us, weight_us, by_backward, by_weight, pieces)

    def _room_us(self, s: int, x: int, first: int) -> float:
        """The earliest time at which F of unit x on stage s can have room: when enough can have been released.

        Units that have begun F of a stage hold what stays there until its B and, of what B leaves, its W have ended.
        None of those of its own microbatch, from `first` on, has.
        """
        levels = self.levels[s]
        oldest = max(0, first - min(MOST_IN_FLIGHT, levels.fitting) * self.count)
        excess, releases, ready = levels.excess[x], [], 0.0
        for t, counts in levels.begun.items():
            count = counts[x]
            if t > s and count:
                ready = max(ready, self.forward_heads[t][count - 1] + self.f[t][count - 1])
            excess -= self.staying_sums[t][min(oldest, count)]
            releases += self.releases[t][oldest:count]
        if excess <= 0:
            return ready
        freed = sorted(
            [(release.ends_us, release.by_backward) for release in releases]
            + [(release.ends_us + release.weight_us, release.by_weight) for release in releases]
        )
        left = excess
        for at_us, size in freed:
            left -= size
            if left <= 0:
                ready = max(ready, at_us)
                break
        return max(ready, self._work_between_us(s, x, excess, releases)) if self.counts_work else ready

    def _copied_us(self, s: int, x: int, first: int, ready: float) -> float:
        """The earliest time from `ready` on at which F of unit x on stage s can have room, by releases and copies.

        Here activations count whole, and what is offloaded was copied out one after another since its F ended.
        """
        device, levels = self.devices[s], self.levels[s]
        excess = self.whole[s][x] + float(self.costs.beside[s, x]) - device.budget
        waiting: list[Waiting] = []
        for t in device.numbers:
            before = x + 1 if t < s else x if t == s else levels.begun[t][x]
            for i in range(before):
                if not self.whole[t][i]:
                    continue
                frees: list[tuple[float, float]] = []
                if i < first:
                    ends_us, left = self.backward_heads[t][i] + self.b[t][i], self.left[t][i]
                    frees = [(ends_us, self.whole[t][i] - left), (ends_us + self.w[t][i], left)]
                excess += self.whole[t][i]
                waiting.append(Waiting(self.moved[t][i], self.forward_heads[t][i] + self.f[t][i], frees))
        return room_us(waiting, excess, device.offload_us, ready) if excess > 0 else ready

    def _later_room_us(self, s: int, u: int, first: int, since_us: float) -> float:
        """The least time, `since_us` or more, after B of unit u on stage s: until those in flight have room with it.

        Units after u in the order of the backwards have no B ended on this or an earlier stage when that B starts. They
        are in flight there unless their F come after it.
        """
        device, last = self.devices[s], first + self.count
        excess, units = self.whole[s][u] - device.budget, []
        for t in (t for t in device.numbers if t <= s):
            own = range(first, u + 1 if t < s else u)
            for i in (*own, *range(last, self.units)):
                if self.whole[t][i]:
                    forward_us = self.f[t][i] + self.forward_tails[t][i] if i >= last else float("inf")
                    back_us = self.b[t][i] + self.backward_tails[t][i] if i >= last else 0.0
                    excess += self.whole[t][i]
                    units.append(InFlight(self.whole[t][i], self.moved[t][i], forward_us, back_us))
        return tail_room_us(units, excess, device.reload_us, self.b[s][u], since_us) if excess > 0 else since_us

    def _work_between_us(self, s: int, x: int, excess: float, releases: Sequence[_Release]) -> float:
        """The earliest start of F of unit x on stage s by the work of its device since some backward can have begun.

        What begins no earlier than that and has to end before F of x: F of the units before, and of these releases the
        least time that frees what the others do not.
        """
        pieces: list[tuple[float, float]] = []  # time for each byte, bytes; the cheapest first
        needed, ready = excess - sum(release.size for release in releases), 0.0
        for release in nlargest(MOST_BEFORE_ROOM, releases, key=lambda release: release.head_us):
            for piece in release.pieces:
                insort(pieces, piece)
            needed += release.size
            if needed <= 0:
                continue
            left, work_us = needed, 0.0
            for rate, size in pieces:
                work_us += rate * min(left, size)
                left -= min(left, size)
            for t, counts in self.levels[s].begun.items():
                count = x + 1 if t < s else x if t == s else counts[x]
                since = bisect_left(self.forward_heads[t], release.head_us, 0, count)
                work_us += self.forward_sums[t][count] - self.forward_sums[t][since]
            ready = max(ready, release.head_us + work_us)
        return ready

    def follow_tails(self, *, to_last_backward: bool = False) -> None:
        """From the end of each op to the end of all; for spans to the end of the last W of the device of stage 0.

        Or, for both objectives, to the end of the last B of stage 0.
        """
        f, b, w, back, n = self.f, self.b, self.w, self.back, self.count
        spans, root = self.problem.objective == "device_span", self.problem.stages[0].device
        self.forward_tails = tails = [[0.0] * self.units for _ in range(self.stages)]
        self.backward_tails = backs = [[0.0] * self.units for _ in range(self.stages)]
        waiting = [self._first_waiting(t) for t in range(self.stages)]
        for first in reversed(range(0, self.units, n)):
            own = range(first, first + n)
            for s in range(self.stages):
                counts = not to_last_backward and (not spans or self.problem.stages[s].device == root)
                for u in own:
                    place = 2 * first + n - 1 - u
                    later = w[s][u] if counts else 0.0
                    if place + 1 < self.units:
                        later = max(later, b[s][back[place + 1]] + backs[s][back[place + 1]])
                    if s:
                        later = max(later, self.delays["backward"][s - 1][u] + b[s - 1][u] + backs[s - 1][u])
                    for other, x in waiting[s][place]:
                        later = max(later, f[other][x] + tails[other][x])
                    if counts and s in self.alone:
                        later = max(later, self.alone[s].backward_tail_us(place))
                    if s in self.devices:
                        later = max(later, self._later_room_us(s, u, first, later))
                    backs[s][u] = later
            for s in reversed(range(self.stages)):
                counts = not to_last_backward and (not spans or self.problem.stages[s].device == root)
                for u in reversed(own):
                    later = b[s][u] + backs[s][u]
                    if u + 1 < self.units:
                        later = max(later, f[s][u + 1] + tails[s][u + 1])
                    if s + 1 < self.stages:
                        later = max(later, self.delays["forward"][s][u] + f[s + 1][u] + tails[s + 1][u])
                    if counts and s in self.alone:
                        later = max(later, self.alone[s].forward_tail_us(u, first))
                    tails[s][u] = later

    def _first_waiting(self, t: int) -> Sequence[Sequence[tuple[int, int]]]:
        """For each place in the order of the backwards of stage t the F that wait for that one, as (stage, unit)."""
        waiting: list[list[tuple[int, int]]] = [[] for _ in range(self.units)]
        for s, entries in self.held.items():
            for other, released in entries:
                if other == t:
                    for x in np.flatnonzero(np.diff(released, prepend=0)).tolist():
                        waiting[released[x] - 1].append((s, x))
        return waiting

    def one_machine_us(self, numbers: Sequence[int]) -> float:
        """The least time at which a device could have run its ops, each not before its head, and all tails have passed.

        Of those that may run the one with the longest tail runs, until that changes (Jackson's preemptive schedule).
        """
        ops: list[tuple[float, float, float]] = []
        for s in numbers:
            for u in range(self.units):
                forward, backward = self.forward_heads[s][u], self.backward_heads[s][u]
                ops.append((forward, self.f[s][u], self.forward_tails[s][u]))
                ops.append((backward, self.b[s][u], self.backward_tails[s][u]))
                ops.append((backward + self.b[s][u], self.w[s][u], 0.0))
        return preemptive_us(ops)


def preemptive_us(ops: Sequence[tuple[float, float, float]]) -> float:
    """The largest end plus tail of ops (head, time, tail) on one machine that may interrupt them: the optimum."""
    ready: list[tuple[float, float]] = []  # the longest tail first
    now, end = 0.0, 0.0
    groups: Iterator[tuple[float, Iterator[tuple[float, float, float]]]] = groupby(sorted(ops), key=lambda op: op[0])
    coming = [(head, [(-tail, time) for _, time, tail in group]) for head, group in groups]
    for k, (head, group) in enumerate(coming):
        now = max(now, head)
        for entry in group:
            heappush(ready, entry)
        until = coming[k + 1][0] if k + 1 < len(coming) else float("inf")
        while ready and now < until:
            less, left = heappop(ready)
            if now + left > until:
                heappush(ready, (less, left - (until - now)))
                now = until
            else:
                now += left
                end = max(end, now - less)
    return end
