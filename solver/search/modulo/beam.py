"""Beam search for a block of a given period on the modulo reservation table.

Dependences between passes are along one chain and the period is given, so places of all passes are searched for at once
instead of one op at a time with ejections.

A device's passes are tied to those of its neighbours: a pass may not begin before its input has come (from a device
placed already), nor so late that its result comes too late there. So devices are placed one after another, each pass
at the free place nearest to the one that suits the neighbour, in many orders, and the states with the least waiting
are kept (a beam search). Neighbouring devices with equal costs come out as shifted copies of one another, or alternate,
without a rule for it.

Waiting between two passes of a chain keeps a microbatch alive on all the devices before them, so it is weighted by the
number of stages that hold it; a W that waits holds its own stage alone.

Where lanes have costs of their own they are in order: a pass is placed between those of the same stage in lanes before
and after it that are placed already, within a period. Places are then starts, not reduced modulo the period, and states
in which a device surely holds more than its budget are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from math import factorial
from typing import NamedTuple

import numpy as np
from numba import njit

from optpipe.ops import Floats, Ints
from solver.search.modulo.pattern import TOLERANCE, Passes
from solver.search.modulo.reservation_table import nearest_start

MOST_PERMUTATIONS = 24
"""Orders in which a device's F and B are placed: all of them with two stages a device, a sample with more."""

FREE_PLACES = 48
"""Places in the period tried for each pass of the first device that nothing ties."""

SAME_STATE = 512
"""Parts of the period to which places are rounded: states with the same rounded places count as one."""

TRIES_AT_ONCE = 10_000
"""Ways to place a device that are tried between two checks of the limits: some hundredths of a second."""


class _Ties(NamedTuple):
    """Durations and preferred starts of a device's passes, by index on the device.

    `anchor[k]`: the pass that ties k, as an index into the device placed before (>= 0), into this device (-2 - index),
    or none (-1). Its preferred start is `offset_us` after the anchor's (before, with `direction` -1); another costs
    `weight` times the difference. `group[k]` numbers what lanes have in common, kind and stage, and `rank[k]` is the
    place of the lane in its order; both -1 where lanes are alike.
    """

    duration_us: Floats
    anchor: Ints
    direction: Ints
    offset_us: Floats
    weight: Floats
    group: Ints
    rank: Ints


@dataclass(frozen=True)
class _Step:
    """Placing one device, whose pass k is ``passes[k]``.

    `framed`: True if ties fix how far apart in time all passes of the device are. `permutations`: orders in which they
    are placed. `closing`: pairs of the chain that come together here, with lag and weight.
    """

    passes: Ints
    ties: _Ties
    framed: bool
    permutations: Ints
    closing: list[tuple[int, int, float, float]]


def find_places(
    passes: Passes,
    period_us: float,
    width: int,
    lean: float,
    rng: np.random.Generator,
    stopped: Callable[[], bool] = lambda: False,
    budgets: Ints | None = None,
) -> list[Floats]:
    """Places modulo the period for all passes: the best `width` of the beam, with the least waiting first.

    `lean` from 0 to 1: how much more the waiting of late stages costs than that of early ones; the mean is the same.
    Lanes with costs of their own are kept within `budgets` (bytes a device) where one stage a device shows early what
    it holds. Empty where no places fit, or where `stopped` ends the search.
    """
    planner = _Planner(passes, lean, rng)
    steps = [planner.step(d) for d in reversed(range(passes.devices)) if len(passes.of_device(d))]
    if not steps:
        return []
    placed = np.full((1, passes.size), np.nan)
    cost = np.zeros(1)
    for k, step in enumerate(steps):
        before = steps[k - 1].passes if k else step.passes
        parents, children, cost = _expand(step, placed[:, before], cost, period_us, rng, k == 0, stopped)
        if not len(cost) or stopped():
            return []
        if passes.ordered and budgets is not None and step.framed:
            fitting = _peak_bytes(passes, step, children, period_us) <= budgets[passes.device[step.passes[0]]]
            parents, children, cost = parents[fitting], children[fitting], cost[fitting]
            if not len(cost):
                return []
        cost = cost + _closing_wait(step, placed, parents, children, period_us)
        # The best states, one of those that differ by a rotation alone: the block may begin anywhere in the period.
        rotated = (children - children[:, :1]) % period_us
        arrangement = np.round(rotated * (SAME_STATE / period_us)).astype(np.int64) % SAME_STATE
        order = np.argsort(cost, kind="stable")
        _, firsts = np.unique(arrangement[order], axis=0, return_index=True)
        kept = order[np.sort(firsts)][:width]
        placed = placed[parents[kept]]
        placed[:, step.passes] = children[kept]
        cost = cost[kept]
    return list(placed)


class _Planner:
    """Plans the steps: devices from the last one on, each tied to those placed before it."""

    def __init__(self, passes: Passes, lean: float, rng: np.random.Generator) -> None:
        self.passes = passes
        self.rng = rng
        self.lean = lean
        self.previous = np.empty(0, np.int64)
        self.done: set[int] = set()
        self.frame: dict[int, int] = {}
        chained = passes.chain[: 2 * passes.stages].tolist()
        self.after = {int(passes.before[p]): p for p in chained if passes.before[p] >= 0}

    def step(self, device: int) -> _Step:
        """The step that places the passes of a device."""
        of_device = self.passes.of_device(device)
        count = len(of_device)
        local = {p: k for k, p in enumerate(of_device.tolist())}
        earlier = {p: k for k, p in enumerate(self.previous.tolist())}
        anchor, direction = np.full(count, -1, np.int64), np.ones(count, np.int64)
        offset, weight = np.zeros(count), np.zeros(count)
        tied = set()
        for p, k in local.items():
            # Tied to the pass that needs it, if that is placed: then it is as late as it may; else to its own input.
            for other, sign in ((self.after.get(p, -1), -1), (int(self.passes.before[p]), 1)):
                inside = sign == 1 and other in local
                if (other in earlier or inside) and anchor[k] == -1:
                    late = other if sign == -1 else p
                    anchor[k] = -2 - local[other] if inside else earlier[other]
                    direction[k], offset[k] = sign, sign * self.passes.lag_us[late]
                    weight[k] = self._weight(late)
                    tied.add(late)
        group, rank = self._in_order(of_device)
        for p, k in local.items():
            tie = int(anchor[k])
            tied_to = int(self.previous[tie]) if tie >= 0 else int(of_device[-2 - tie]) if tie <= -2 else -1
            self.frame[p] = self.frame.get(tied_to, int(group[k]))  # their order ties the lanes of a group
        self.done.update(local)
        closing = [
            (int(self.passes.before[p]), p, float(self.passes.lag_us[p]), self._weight(p))
            for p in (*local, *(self.after.get(q, -1) for q in local))
            if p in self.done and p not in tied and int(self.passes.before[p]) in self.done
        ]
        self.previous = of_device
        orders = self._permutations(of_device, anchor, direction)
        ties = _Ties(self.passes.duration_us[of_device], anchor, direction, offset, weight, group, rank)
        framed = len({self.frame[p] for p in local}) == 1
        return _Step(of_device, ties, framed, orders, list(dict.fromkeys(closing)))

    def _in_order(self, of_device: Ints) -> tuple[Ints, Ints]:
        """`_Ties.group` and `_Ties.rank` of the passes of a device."""
        passes = self.passes
        if not passes.ordered:
            alike = np.full(len(of_device), -1, np.int64)
            return alike, alike
        kind, stage = np.divmod(of_device, passes.stages)
        group = kind * passes.model_stages + stage % passes.model_stages
        rank = passes.rank[of_device]
        return group, ((group[:, None] == group) & (rank[:, None] > rank)).sum(axis=1)

    def _weight(self, late: int) -> float:
        """Cost in memory of each us that a pass waits for its input."""
        kind, stage = divmod(late, self.passes.stages)
        if kind == 2:
            held = max(1, int(self.passes.stage_bytes[stage]))
            return float(self.passes.weight_bytes[stage] / held) / self.passes.devices
        holding = stage % self.passes.model_stages + kind
        return 1 + self.lean * (2 * holding / self.passes.model_stages - 1)

    def _permutations(self, of_device: Ints, anchor: Ints, direction: Ints) -> Ints:
        """Orders of placing F and B in which each comes after its anchor, W last; a sample where there are many.

        The lanes of a pass are placed one right after the other, those that are in order also by turns with others:
        in their order, or against it where each is wanted as late as it may be.
        """
        lanes: dict[tuple[int, int], list[int]] = {}
        for k in sorted(range(len(of_device)), key=lambda k: int(self.passes.rank[of_device[k]])):
            kind, stage = divmod(int(of_device[k]), self.passes.stages)
            lanes.setdefault((kind, stage % self.passes.model_stages), []).append(k)
        if self.passes.ordered:
            lanes = {key: ks[::-1] if direction[ks[0]] < 0 else ks for key, ks in lanes.items()}
        chained = [ks for (kind, _), ks in lanes.items() if kind < 2]
        rest = [k for (kind, _), ks in lanes.items() if kind == 2 for k in ks]
        many = factorial(len(chained)) > MOST_PERMUTATIONS
        sample = (self.rng.permutation(len(chained)).tolist() for _ in range(MOST_PERMUTATIONS))
        tried = sample if many else permutations(range(len(chained)))
        orders = [[k for c in order for k in chained[c]] for order in tried]
        if self.passes.ordered:
            orders += [[k for ks in zip(*part, strict=True) for k in ks] for part in (chained, chained[::-1])]
        fitting = [_after_anchors(order, anchor) for order in orders]
        return np.array([[*order, *rest] for order in dict.fromkeys(map(tuple, fitting))], np.int64)


def _after_anchors(order: list[int], anchor: Ints) -> list[int]:
    """The order with each pass moved behind its anchor on the same device."""
    result: list[int] = []
    rest = list(order)
    while rest:
        k = next(k for k in rest if anchor[k] >= -1 or -2 - anchor[k] in result)
        rest.remove(k)
        result.append(k)
    return result


def _expand(
    step: _Step,
    before: Floats,
    cost: Floats,
    period_us: float,
    rng: np.random.Generator,
    first: bool,
    stopped: Callable[[], bool],
) -> tuple[Ints, Floats, Floats]:
    """All ways tried to place one device after each state: parents, places, costs.

    Each order of placing is tried twice: as it is, and with one pass, chosen at random, at its second best place. The
    nearest place for each is greedy and excludes better arrangements of the device. On the first device passes without
    an anchor are tried at random places of the period.
    """
    free = np.flatnonzero(step.ties.anchor == -1)[1:]
    tries = 2 * len(step.permutations) * (FREE_PLACES if first and len(free) else 1)
    count = len(step.passes)
    skipped = rng.integers(count, size=(len(cost), tries))
    skipped[:, : len(step.permutations)] = -1
    preferred = np.zeros((tries, count))
    if first and (step.ties.group >= 0).any():
        preferred = _spread(step, tries, period_us, rng)
    elif first:
        preferred[:, free] = rng.random((tries, len(free))) * period_us
    places = np.empty((len(cost) * tries, count))
    costs = np.full(len(cost) * tries, -1.0)
    at_once = max(1, TRIES_AT_ONCE // tries)
    for state in range(0, len(cost), at_once):
        if stopped():
            break
        part, rows = slice(state, state + at_once), slice(state * tries, (state + at_once) * tries)
        _place_all(
            before[part], cost[part], step.permutations, step.ties, skipped[part], preferred, period_us, places[rows],
            costs[rows],
        )  # fmt: skip
    fitting = np.flatnonzero(costs >= 0)
    return fitting // tries, places[fitting], costs[fitting]


def _spread(step: _Step, tries: int, period_us: float, rng: np.random.Generator) -> Floats:
    """Places to try for the passes of the first device that nothing ties, of shape (tries, passes).

    Lanes of a stage come in their order: one right after another in a quarter of the tries, else at random places.
    """
    ties = step.ties
    places = np.zeros((tries, len(step.passes)))
    spread = period_us * rng.random((tries, 1)) * (np.arange(tries)[:, None] % 4 > 0)
    loose = np.flatnonzero(ties.anchor == -1)
    for number, group in enumerate(dict.fromkeys(ties.group[loose].tolist())):
        lanes = loose[ties.group[loose] == group]
        lanes = lanes[np.argsort(ties.rank[lanes])]
        apart = np.sort(rng.random((tries, len(lanes))), axis=1)
        apart[:, 0] = 0
        begin = rng.random((tries, 1)) * period_us if number else 0.0
        places[:, lanes] = begin + apart * spread
    return places


def _peak_bytes(passes: Passes, step: _Step, starts: Floats, period_us: float) -> Ints:
    """Peak of a device in each state, as `Pattern.peak_bytes` counts it."""
    by_rank = np.argsort(passes.rank[step.passes])
    of_device, starts = step.passes[by_rank], starts[:, by_rank]
    rounds = np.floor(starts / period_us + TOLERANCE).astype(np.int64)
    order = np.argsort(starts - rounds * period_us, axis=1, kind="stable")
    changes = np.stack([passes.at_start[of_device], passes.at_end[of_device]], axis=1)
    within = np.cumsum(changes[order].reshape(len(starts), -1), axis=1).max(axis=1, initial=0)
    peaks: Ints = within - rounds @ changes.sum(axis=1)
    return peaks


@njit(cache=True)
def _place_all(
    before: Floats,
    cost: Floats,
    orders: Ints,
    ties: _Ties,
    skipped: Ints,
    preferred: Floats,
    period: float,
    places: Floats,
    costs: Floats,
) -> None:
    """Place the passes of a device after each state in all ways tried; a cost of -1 where they do not fit."""
    tries = skipped.shape[1]
    for state in range(len(cost)):
        for k in range(tries):
            row = state * tries + k
            order = orders[k % len(orders)]
            added = _place_one(before[state], order, ties, skipped[state, k], preferred[k], period, places[row])
            costs[row] = -1.0 if added < 0 else cost[state] + added


@njit(cache=True)
def _place_one(
    before: Floats, order: Ints, ties: _Ties, skipped: int, preferred: Floats, period: float, place: Floats
) -> float:
    """Place one device's passes in this order; returns the waiting, -1 where they do not fit."""
    duration, anchor, direction, offset, weight, group, rank = ties
    count, tolerance = len(order), TOLERANCE * period
    starts, lengths = np.empty(count), np.empty(count)
    total = 0.0
    for done in range(count):
        k = order[done]
        left = -np.sort(-duration[order[done + 1 :]])
        at = preferred[k]
        if anchor[k] >= 0:
            at = before[anchor[k]] + offset[k]
        elif anchor[k] <= -2:
            at = place[-2 - anchor[k]] + offset[k]
        skip = 1 if skipped == k else 0
        wanted, low, high = at, -np.inf, np.inf
        if group[k] >= 0:
            for other in order[:done]:
                if group[other] != group[k]:
                    continue
                behind = place[other] + duration[other]
                ahead = place[other] - duration[k]
                earlier = rank[other] < rank[k]
                low = max(low, behind if earlier else behind - period)
                high = min(high, ahead + period if earlier else ahead)
            wanted = max(at, low) if direction[k] > 0 else min(at, high)
        start = nearest_start(
            wanted, direction[k], skip, duration[k], period, starts[:done], lengths[:done], left, tolerance
        )
        if np.isnan(start) or start < low - tolerance or start > high + tolerance:
            return -1.0
        total += weight[k] * abs(start - at)
        place[k] = start
        start %= period
        if start > period - tolerance:
            start = 0.0
        if group[k] < 0:
            place[k] = start
        slot = done
        while slot > 0 and starts[slot - 1] > start:
            starts[slot], lengths[slot] = starts[slot - 1], lengths[slot - 1]
            slot -= 1
        starts[slot], lengths[slot] = start, duration[k]
    return total


def _closing_wait(step: _Step, placed: Floats, parents: Ints, children: Floats, period_us: float) -> Floats:
    """Cost of the waits between passes of which neither is the other's anchor."""
    local = {p: k for k, p in enumerate(step.passes.tolist())}

    def place(p: int) -> Floats:
        return children[:, local[p]] if p in local else placed[parents, p]

    total = np.zeros(len(children))
    for early, late, lag, weight in step.closing:
        wait = (place(late) - place(early) - lag) % period_us
        total += weight * np.where(wait > period_us * (1 - TOLERANCE), 0.0, wait)
    return total
