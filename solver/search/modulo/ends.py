"""Prologue and epilogue (warm-up and cool-down) of a repeated block.

The pattern's order is a plan for every device. A device that would have to wait may take a later pass whose input is
there, if after it all that is planned before it still has room in the budget: so the plan can always go on, and
memory keeps within the budget. How far ahead of its plan a pass may run is a number of rounds for each pass and each
end; it is what `tuned_ends` searches over, and so is when W begin to wait for the cool-down. In
between the plan is followed as it is.

It plays few microbatches, just enough for a warm-up, a cool-down and some rounds between, so that its time does not
depend on how many there are. The same ends then serve for any number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise, product

import numpy as np
from numba import njit
from numpy.typing import NDArray

from solver.search.modulo.pattern import Floats, Ints, Passes, Pattern


@dataclass(frozen=True)
class Ends:
    """How the ends of a schedule depart from its pattern.

    `early[e, p]`: rounds that pass p may run ahead of its plan in the warm-up (e = 0) and the cool-down (e = 1).
    `patience`: the share of a pass's time by which it may delay the planned one, where the input of that one is known
    to come. Once a device has no more than ``hurry[d]`` forwards left, its W come behind all else that has room: so
    the last backwards leave it at the pace of F and B alone, and there are W left to fill the cool-down with.
    """

    early: Ints
    patience: float
    hurry: Ints


class Filler:
    """Plays a pattern for a number of microbatches with different ends."""

    def __init__(self, pattern: Pattern, passes: Passes, microbatches: int, budgets: Ints, by_span: bool) -> None:
        """`passes` are those of a single lane; `by_span`: the objective is the largest span of a device."""
        self.passes = passes
        self.microbatches = microbatches
        self.budgets = budgets
        self.by_span = by_span
        self.end = pattern.in_flight + 1
        plans = pattern.plan(microbatches)
        self.first = np.concatenate([[0], np.cumsum([len(plan.passes) for plan in plans])]).astype(np.int64)
        self.planned, self.microbatch, self.round = (np.concatenate(parts) for parts in zip(*plans, strict=True))
        self.where = np.empty((passes.size, microbatches), np.int64)
        self.where[self.planned, self.microbatch] = np.arange(len(self.planned))
        self.local = np.argsort(passes.device, kind="stable")
        self.begin = np.searchsorted(passes.device[self.local], np.arange(passes.devices + 1))
        self.forwards = self._forwards(microbatches)
        self.order = np.empty(len(self.planned), np.int64)
        self.after = np.full((passes.size, 2), -1, np.int64)
        for p in np.flatnonzero(passes.before >= 0):
            after = self.after[passes.before[p]]
            after[np.argmax(after < 0)] = p

    @property
    def cool_down(self) -> Ints:
        """For each device the forwards of the microbatches that count as the cool-down."""
        return self._forwards(min(self.end, self.microbatches))

    def _forwards(self, microbatches: int) -> Ints:
        """For each device its forwards of so many microbatches."""
        stages = np.bincount(self.passes.device[: self.passes.stages], minlength=self.passes.devices)
        return stages.astype(np.int64) * microbatches

    def value_us(self, ends: Ends) -> float:
        """The makespan, or the largest span of a device, when every pass starts as early as it may.

        Infinity where passes without length are planned before what they need; there are no orders then.
        """
        passes = self.passes
        value = _fill(
            self.first, self.planned, self.microbatch, self.round, self.where, self.local, self.begin,
            self.forwards, passes.stages, passes.device, passes.duration_us, passes.before,
            passes.lag_us, self.after, passes.at_start, passes.at_end, self.budgets,
            ends.early, self.end, ends.patience, ends.hurry, self.by_span, self.order,
        )  # fmt: skip
        return float(value)

    def orders(self, ends: Ends) -> list[tuple[Ints, Ints]]:
        """The passes and microbatches of each device in the order in which it runs them."""
        self.value_us(ends)
        parts = [self.order[a:b] for a, b in pairwise(self.first.tolist())]
        return [(self.planned[part], self.microbatch[part]) for part in parts]


@njit(cache=True)
def _fill(
    first: Ints,
    planned: Ints,
    microbatch: Ints,
    rounds: Ints,
    where: Ints,
    local: Ints,
    begin: Ints,
    forwards: Ints,
    stages: int,
    home: Ints,
    duration: Floats,
    before: Ints,
    lag: Floats,
    after: Ints,
    at_start: Ints,
    at_end: Ints,
    budgets: Ints,
    early: Ints,
    end: int,
    patience: float,
    hurry: Ints,
    by_span: bool,
    order: Ints,
) -> float:
    """Run the plan in the order of time; returns the objective, infinity where the plan cannot be run.

    That is so only where passes without length at one instant are planned in a circle.

    ``where[p, i]`` is the place in `planned` of pass p of microbatch i, ``local[begin[d]:begin[d + 1]]`` are the passes
    of device d, `forwards` says how many each device has. Writes to `order` the places in `planned` of the passes run,
    device by device. (Arguments are plain arrays: in tuples they made this two to three times slower.)

    ``planned[head[d]]`` is the first pass of device d's plan that has not run, `left` the forwards that it still has,
    `level` the bytes that it holds, `upcoming` the next microbatch of each pass, and `wake` the moments at which a
    device looks for something to do.
    """
    devices, microbatches = len(first) - 1, where.shape[1]
    started = np.full((len(before), microbatches), np.inf)
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
        late = left[d] <= hurry[d]
        lead = _first_without_weights(head[d], first[d + 1], done, planned, 2 * stages) if late else head[d]
        p, i = planned[lead], microbatch[lead]
        comes = 0.0 if before[p] < 0 else started[before[p], i] + lag[p]
        if comes <= now and _has_room(lead, head[d], done, planned, at_start, at_end, level[d], budgets[d]):
            chosen = lead
        else:
            chosen = _instead(
                local[begin[d] : begin[d + 1]], upcoming, started, before, lag, where, rounds, duration, early, end,
                patience, done, planned, at_start, at_end, level[d], budgets[d], head[d], lead, now, comes,
                2 * stages if late else len(before),
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
        started[p, i] = now
        begun[d] = min(begun[d], now)
        free_at[d] = now + duration[p]
        while head[d] < first[d + 1] and done[head[d]]:
            head[d] += 1
        heappush(wake, (free_at[d], d))
        for k in range(2):
            q = after[p, k]
            if q >= 0:
                heappush(wake, (max(now + lag[q], free_at[home[q]]), home[q]))
    if (head < first[1:]).any():
        return np.inf
    return float((free_at - np.minimum(begun, free_at)).max() if by_span else free_at.max())


@njit(cache=True)
def _instead(
    here: Ints, upcoming: Ints, started: Floats, before: Ints, lag: Floats, where: Ints, rounds: Ints, duration: Floats,
    early: Ints, end: int, patience: float, done: NDArray[np.bool_], planned: Ints, at_start: Ints, at_end: Ints,
    level: int, budget: int, head: int, lead: int, now: float, comes: float, behind: int,
) -> int:  # fmt: skip
    """The place of the pass that a device runs `now` because the one at `lead` cannot; -1 where it has to wait.

    Of its passes `here` it is the first of the plan that may run; those numbered from `behind` on come after all
    others. The input of the pass at `lead` is there from `comes` on.
    """
    microbatches = where.shape[1]
    chosen, best = -1, np.int64(2) * len(planned)
    for p in here:
        i = upcoming[p]
        if i == microbatches or (before[p] >= 0 and started[before[p], i] + lag[p] > now):
            continue
        place = where[p, i]
        rank = place + (len(planned) if p >= behind else 0)
        if rank >= best:
            continue
        if place != head:
            allowed = _allowed(early, p, i, end, microbatches)
            if rounds[place] - rounds[lead] > allowed or now < comes < now + (1.0 - patience) * duration[p]:
                continue
            if not _has_room(place, head, done, planned, at_start, at_end, level, budget):
                continue
        chosen, best = place, rank
    return chosen


@njit(cache=True)
def _allowed(early: Ints, p: int, i: int, end: int, microbatches: int) -> int:
    """How many rounds a pass may run ahead of its plan: some at the ends, none in between."""
    allowed = early[0, p] if i < end else 0
    return max(allowed, early[1, p]) if i >= microbatches - end else allowed


@njit(cache=True)
def _first_without_weights(head: int, end: int, done: NDArray[np.bool_], planned: Ints, weights: int) -> int:
    """The next pass of the plan that is not a W (`weights` or above); the next one at all if only W are left."""
    for k in range(head, end):
        if planned[k] < weights and not done[k]:
            return k
    return head


@njit(cache=True)
def _has_room(
    early: int, head: int, done: NDArray[np.bool_], planned: Ints, at_start: Ints, at_end: Ints, level: int, budget: int
) -> bool:
    """Whether a pass has room now, and after it everything that is planned before it."""
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


EARLY = (0, 2, 9)
PATIENCE = (0.0, 0.5)
"""What is tried first, for all passes alike and without hurry."""

HURRY = (0.5, 1.0)
"""Parts of each device's forwards in the cool-down that are left when its W begin to wait: tried next."""

FIRST_PLAYS = len(EARLY) * len(PATIENCE) + len(HURRY)
"""How often `first_ends` plays a pattern."""

EARLY_BELOW = 12
"""A change lets passes run fewer rounds than this ahead of their plan."""

HURRY_CHANGES = 0.2
"""Share of the steps that change when devices begin to hurry."""

SLACK = 1e-4
"""Share of the value by which a step may be worse at the beginning of a search."""


def few_microbatches(pattern: Pattern, microbatches: int) -> int:
    """So many microbatches that both ends of the schedule are there in full, as many as rounds allow."""
    lanes = pattern.passes.lanes
    enough = 2 * pattern.in_flight + 4 * lanes
    return microbatches if microbatches <= enough else enough + (microbatches - enough) % lanes


def first_ends(filler: Filler) -> tuple[float, Ends]:
    """The best of a few simple ends, with its value in us."""
    ahead, calm = np.ones((2, filler.passes.size), np.int64), np.zeros_like(filler.cool_down)
    value, ends = _best(filler, [Ends(early * ahead, patience, calm) for early, patience in product(EARLY, PATIENCE)])
    hurries = [np.floor(share * filler.cool_down).astype(np.int64) for share in HURRY]
    other = _best(filler, [replace(ends, hurry=hurry) for hurry in hurries])
    return min((value, ends), other, key=lambda pair: pair[0])


def _best(filler: Filler, tried: list[Ends]) -> tuple[float, Ends]:
    """The best of these ends, with its value in us."""
    values = [filler.value_us(ends) for ends in tried]
    best = int(np.argmin(values))
    return values[best], tried[best]


def tuned_ends(
    filler: Filler, ends: Ends, steps: int, rng: np.random.Generator, stopped: Callable[[], bool]
) -> tuple[float, Ends]:
    """The best ends found in so many steps from some to begin with, with their value in us."""
    current = best = (filler.value_us(ends), ends)
    for step in range(steps):
        if stopped():
            break
        other = _changed(current[1], filler, rng)
        value = filler.value_us(other)
        if value <= current[0] * (1 + SLACK * (1 - step / steps)):
            current = (value, other)
            best = min(best, current, key=lambda pair: pair[0])
    return best


def _changed(ends: Ends, filler: Filler, rng: np.random.Generator) -> Ends:
    """Up to three changes: of one pass, of one kind on neighbouring stages, or of a device; or when to hurry."""
    if rng.random() < HURRY_CHANGES:
        return replace(ends, hurry=_hurried(ends.hurry, filler.cool_down, rng))
    early = ends.early.copy()
    for _ in range(int(rng.integers(1, 4))):
        early[rng.integers(2), _group(filler.passes, rng)] = rng.integers(EARLY_BELOW)
    return replace(ends, early=early, patience=float(rng.choice(PATIENCE)) if rng.random() < 0.1 else ends.patience)


def _hurried(hurry: Ints, at_most: Ints, rng: np.random.Generator) -> Ints:
    """The same with another share of the cool-down on one device or some neighbours."""
    first = int(rng.integers(len(hurry)))
    last = first + 1 + int(rng.integers(len(hurry) - first))
    changed = hurry.copy()
    changed[first:last] = np.floor(rng.random() * (at_most[first:last] + 1))
    return changed


def _group(passes: Passes, rng: np.random.Generator) -> Ints:
    """One pass, those of one kind on neighbouring stages, or those of a device."""
    way = rng.random()
    if way < 0.4:
        return rng.integers(passes.size, size=1)
    if way < 0.8:
        first = int(rng.integers(passes.stages))
        last = min(passes.stages, first + 1 + int(rng.integers(passes.stages)))
        return int(rng.integers(3)) * passes.stages + np.arange(first, last)
    return passes.of_device(int(rng.integers(passes.devices)))
