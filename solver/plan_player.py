"""Plays a plan in the order of time, where ops may run ahead of it: the compiled kernel of V schedules and of ends.

A plan is an order for every device. A device whose next planned op has to wait may take a later one whose input is
there, if after it all that is planned before it still has room in the budget. So the plan can always go on, and
memory keeps within the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
from numba import njit

from optpipe.kinds import TRAINING, codes
from optpipe.ops import Bools, Floats, Ints
from optpipe.problem import Problem
from optpipe.task_graph import lower


@dataclass(frozen=True)
class PassCosts:
    """Costs and inputs of each pass of a microbatch: pass ``kind * stages + stage`` is an F, B or W (0, 1, 2).

    `before`: the pass whose result each needs (-1: none). `delay_us`: from the end of that one on (less than 0: before
    it). `follows[p]`: the pass of its device that must have run before p (-1: none), and how many microbatches before
    p's own. `at_start` and `at_end`: changes of memory, bytes.
    """

    stages: int
    devices: int
    duration_us: Floats
    device: Ints
    before: Ints
    delay_us: Floats
    follows: Ints
    at_start: Ints
    at_end: Ints

    @property
    def size(self) -> int:
        """Number of passes of a microbatch: F, B and W of each stage."""
        return 3 * self.stages


def pass_costs(problem: Problem, unit: int = 0) -> PassCosts:
    """The passes of a unit of a problem: F along the stages, B back, each W behind its B."""
    count, graph = len(problem.stages), lower(problem)
    types = (graph.plain_types[[*codes(TRAINING)]] + graph.unit_class[unit]).ravel()
    before, delay_us = np.arange(-1, 3 * count - 1), np.zeros(3 * count)
    before[count : 2 * count] = [*range(count + 1, 2 * count), count - 1]
    before[2 * count :] = range(count, 2 * count)
    delay_us[1:count] = graph.delays_us["forward"][:, unit]
    delay_us[count : 2 * count - 1] = graph.delays_us["backward"][:, unit]
    return PassCosts(
        stages=count,
        devices=len(problem.devices),
        duration_us=graph.duration_us[types],
        device=np.tile(graph.device, 3),
        before=before,
        delay_us=delay_us,
        follows=np.tile([-1, 0], (3 * count, 1)),
        at_start=graph.device_bytes[types, 0],
        at_end=graph.device_bytes[types, 1],
    )


class PlanPlayer:
    """Plays plans of the same passes for a number of microbatches within budgets, as often as asked."""

    def __init__(
        self, passes: PassCosts, plans: Sequence[tuple[Ints, Ints, Ints]], microbatches: int, budgets: Ints
    ) -> None:
        """`plans`: for each device passes, microbatches and rounds in order; each pass in the order of microbatches.

        A pass may lack the last microbatches.
        """
        self.passes = passes
        self.microbatches = microbatches
        self.budgets = budgets
        self.first = np.cumsum([0, *(len(plan[0]) for plan in plans)])
        self.planned, self.microbatch, self.round = (np.concatenate(parts) for parts in zip(*plans, strict=True))
        self.where = np.full((passes.size, microbatches), -1, np.int64)
        self.where[self.planned, self.microbatch] = np.arange(len(self.planned))
        self.counts = np.bincount(self.planned, minlength=passes.size).astype(np.int64)
        forwards = self.counts[: passes.stages]
        self.planned_forwards = np.bincount(passes.device[: passes.stages], forwards, passes.devices).astype(np.int64)
        self.local = np.argsort(passes.device, kind="stable")
        self.begin = np.searchsorted(passes.device[self.local], np.arange(passes.devices + 1))
        self.order = np.empty(len(self.planned), np.int64)
        self.after = np.full((passes.size, 2), -1, np.int64)
        for p in np.flatnonzero(passes.before >= 0):
            after = self.after[passes.before[p]]
            after[np.argmax(after < 0)] = p

    def forwards(self, microbatches: int) -> Ints:
        """For each device its forwards of so many microbatches."""
        stages = np.bincount(self.passes.device[: self.passes.stages], minlength=self.passes.devices)
        return stages.astype(np.int64) * microbatches

    def play(self, early: Ints, end: int, delay_share: float, weights_last: Ints, by_span: bool) -> float:
        """The makespan in us, or the largest span of a device, when every pass starts as early as it may.

        ``early[e, p]``: rounds that pass p may run ahead of its plan in the first (e = 0) and the last (e = 1) `end`
        microbatches. `delay_share`: the share of a pass's time by which it may delay the planned one, where the input
        of that one is known to come. A device with no more than ``weights_last[d]`` forwards left runs its W behind all
        else.
        Infinity where passes without length are planned before what they need; there are no orders then.
        """
        passes = self.passes
        value_us = _play(
            self.first, self.planned, self.microbatch, self.round, self.where, self.counts, self.local, self.begin,
            self.planned_forwards, passes.stages, passes.device, passes.duration_us, passes.before, passes.delay_us,
            passes.follows, self.after, passes.at_start, passes.at_end, self.budgets,
            early, end, delay_share, weights_last, by_span, self.order,
        )  # fmt: skip
        return float(value_us)

    def played(self) -> list[tuple[Ints, Ints]]:
        """The passes and microbatches of each device in the order in which it ran them when last played."""
        parts = [self.order[begin:end] for begin, end in pairwise(self.first.tolist())]
        return [(self.planned[part], self.microbatch[part]) for part in parts]


@njit(cache=True)
def _play(
    first: Ints,
    planned: Ints,
    microbatch: Ints,
    rounds: Ints,
    where: Ints,
    counts: Ints,
    local: Ints,
    begin: Ints,
    forwards: Ints,
    stages: int,
    home: Ints,
    duration: Floats,
    before: Ints,
    delay: Floats,
    follows: Ints,
    after: Ints,
    at_start: Ints,
    at_end: Ints,
    budgets: Ints,
    early: Ints,
    end: int,
    delay_share: float,
    weights_last: Ints,
    by_span: bool,
    order: Ints,
) -> float:
    """Run the plan in the order of time; returns the objective, infinity where the plan cannot be run.

    That is so only where passes without length at one instant are planned in a cycle.

    ``where[p, i]`` is the place in `planned` of pass p of microbatch i, ``local[begin[d]:begin[d + 1]]`` are the passes
    of device d, `forwards` says how many forwards each device has, `counts` how often each pass runs. Writes to `order`
    the places in `planned` of the passes run, device by device. (Arguments are plain arrays: in tuples they made this
    two to three times slower.)

    ``planned[head[d]]`` is the first pass of device d's plan that has not run, `left` the forwards that it still has,
    `level` the bytes that it holds, `upcoming` the next microbatch of each pass, and `wake` the moments at which a
    device looks for something to do.
    """
    devices, microbatches = len(first) - 1, where.shape[1]
    ended = np.full((len(before), microbatches), np.inf)
    upcoming = np.zeros(len(before), np.int64)
    done = np.zeros(len(planned), np.bool_)
    head, written = first[:-1].copy(), first[:-1].copy()
    left, level = forwards.copy(), np.zeros(devices, np.int64)
    begun, free_at = np.full(devices, np.inf), np.zeros(devices)
    wake = [(0.0, d) for d in range(devices)]
    while len(wake):
        now, d = heappop(wake)
        if head[d] == first[d + 1] or now < free_at[d]:
            continue
        late = left[d] <= weights_last[d]
        lead = _first_without_weights(head[d], first[d + 1], done, planned, 2 * stages) if late else head[d]
        p, i = planned[lead], microbatch[lead]
        comes = 0.0 if before[p] < 0 else ended[before[p], i] + delay[p]
        if comes <= now and _has_room(lead, head[d], done, planned, at_start, at_end, level[d], budgets[d]):
            chosen = lead
        else:
            chosen = _instead(
                local[begin[d] : begin[d + 1]], upcoming, ended, before, delay, follows, where, counts, rounds,
                duration, early, end, delay_share, done, planned, at_start, at_end, level[d], budgets[d], head[d], lead,
                now, comes, 2 * stages if late else len(before),
            )  # fmt: skip
        if chosen < 0:
            if now < comes < np.inf:
                heappush(wake, (comes, d))
            continue
        p, i = planned[chosen], microbatch[chosen]
        done[chosen] = True
        order[written[d]] = chosen
        written[d] += 1
        upcoming[p] += 1
        if p < stages:
            left[d] -= 1
        level[d] += at_start[p] + at_end[p]
        begun[d] = min(begun[d], now)
        free_at[d] = ended[p, i] = now + duration[p]
        while head[d] < first[d + 1] and done[head[d]]:
            head[d] += 1
        heappush(wake, (free_at[d], d))
        for k in range(2):
            q = after[p, k]
            if q >= 0:
                # Not before now, even where a pass begins before the end of the one that it needs.
                heappush(wake, (max(now, free_at[d] + delay[q], free_at[home[q]]), home[q]))
    if (head < first[1:]).any():
        return np.inf
    return float((free_at - np.minimum(begun, free_at)).max() if by_span else free_at.max())


@njit(cache=True)
def _instead(
    passes: Ints, upcoming: Ints, ended: Floats, before: Ints, delay: Floats, follows: Ints, where: Ints,
    counts: Ints, rounds: Ints, duration: Floats, early: Ints, end: int, delay_share: float, done: Bools, planned: Ints,
    at_start: Ints, at_end: Ints, level: int, budget: int, head: int, lead: int, now: float, comes: float, behind: int,
) -> int:  # fmt: skip
    """The place of the pass that a device runs `now` because the one at `lead` cannot; -1 where it has to wait.

    Of its `passes` it is the first of the plan that may run; those numbered from `behind` on come after all
    others. The input of the pass at `lead` is there from `comes` on.
    """
    microbatches = where.shape[1]
    chosen, best = -1, np.int64(2) * len(planned)
    for p in passes:
        i = upcoming[p]
        if i == counts[p] or (before[p] >= 0 and ended[before[p], i] + delay[p] > now):
            continue
        if follows[p, 0] >= 0 and upcoming[follows[p, 0]] + follows[p, 1] <= i:
            continue
        place = where[p, i]
        rank = place + (len(planned) if p >= behind else 0)
        if rank >= best:
            continue
        if place != head:
            allowed = _allowed(early, p, i, end, microbatches)
            if rounds[place] - rounds[lead] > allowed or now < comes < now + (1.0 - delay_share) * duration[p]:
                continue
            if not _has_room(place, head, done, planned, at_start, at_end, level, budget):
                continue
        chosen, best = place, rank
    return chosen


@njit(cache=True)
def _allowed(early: Ints, p: int, i: int, end: int, microbatches: int) -> int:
    """Number of rounds that a pass may run ahead of its plan: some at the ends, none in between."""
    allowed = early[0, p] if i < end else 0
    return max(allowed, early[1, p]) if i >= microbatches - end else allowed


@njit(cache=True)
def _first_without_weights(head: int, end: int, done: Bools, planned: Ints, weights: int) -> int:
    """The next pass of the plan that is not a W (`weights` or above); the next one at all if only W are left."""
    for k in range(head, end):
        if planned[k] < weights and not done[k]:
            return k
    return head


@njit(cache=True)
def _has_room(
    early: int, head: int, done: Bools, planned: Ints, at_start: Ints, at_end: Ints, level: int, budget: int
) -> bool:
    """True if a pass has room now, and after it everything that is planned before it."""
    if early == head:
        return True
    p = planned[early]
    if level + max(at_start[p], at_start[p] + at_end[p]) > budget:
        return False
    level += at_start[p] + at_end[p]
    for k in range(head, early):
        if not done[k]:
            p = planned[k]
            if level + max(at_start[p], at_start[p] + at_end[p]) > budget:
                return False
            level += at_start[p] + at_end[p]
    return True
