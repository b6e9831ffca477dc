"""Search for cuts of layers into stages: bounds of many, list schedules of the promising ones.

A cut is rated by what the step takes: the busiest device alone says nothing of the warm-up's memory, nor of who begins
late. `CutBounds` bounds all cuts where there are few, else those that a local search meets; those whose bound is above
the best value are never looked at. The others are rated by quick list schedules, the least bound first, then the
neighbours of the best, in which one layer has moved from a stage to another. Before that one good cut has a rating,
which takes little time, so that each of many layouts can have one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, combinations
from math import comb, inf

import numpy as np

from optpipe.ops import Floats, Ints
from optpipe.problem import Problem
from solver.bounds import lower_bound_us
from solver.layout.cut_bounds import STEEP, CutBounds
from solver.layout.quick_rating import QuickRating
from solver.limits import Limits
from solver.scale import count_ops
from solver.search.in_flight import QUICK
from solver.serial import impossible_budgets

MOST_ALL = 60_000
"""Cuts of which all are bounded: half a second."""

BATCH = 4096
"""Cuts bounded at once."""

POOL = 400
"""Cuts of the least bounds that are kept for rating."""

KICKS = 12
"""Times that a local search begins anew, from its best cut with some boundaries moved at random."""

MOST_MOVES = 1000
"""Moves looked at in one step of a local search; of more only those that concern the device with the largest bound."""

MOST_RATED = 120
"""Cuts rated by quick list schedules."""

LEAST_OPS = 15_000
"""Ops of problems rated before the time counts: a tenth of a second of one core."""

NEIGHBOURS = 24
"""Neighbours of one cut rated at once, those of the least bounds."""

IMPROVED = 16
"""Cuts whose list schedules are searched for, and whose neighbours are rated."""

CLOSE = 1.1
"""Values up to so many times the best one make it worth computing a cut's bound in full: 20 ms."""

KEPT = 8
"""Cuts kept for each layout."""

REFINED = 60
"""Cuts with bounds below the best value whose bounds are computed in full."""

TOLERANCE = 1e-9
"""Values and bounds that differ by less than this share count as equal."""

Sizes = tuple[int, ...]
Build = Callable[[Sizes], Problem | None]


def even_sizes(layers: int, stages: int) -> Sizes:
    """Layers per stage, equal up to one; the first stages take the remainder, as in most frameworks."""
    size, remainder = divmod(layers, stages)
    return tuple(size + (s < remainder) for s in range(stages))


def even_cut(bounds: CutBounds) -> Sizes:
    """The even cut of layers of which the last may have to be in a stage of its own, or must not be."""
    layers, stages = bounds.layers, bounds.stages
    sizes = even_sizes(layers, stages)
    if bounds.alone is None or (sizes[-1] == 1) == bounds.alone:
        return sizes
    last = 1 if bounds.alone else 2
    return *even_sizes(layers - last, stages - 1), last


@dataclass(frozen=True)
class FoundCuts:
    """The best cuts with their ratings, the best first, and a bound on every schedule of every cut."""

    rated: Mapping[Sizes, QuickRating]
    least_us: float


@dataclass
class _Pool:
    """Cuts with the least bounds, in their order, and a bound on all cuts.

    `whole`: all cuts were bounded, and those that are not here have at least `least_outside_us`.
    """

    cuts: Ints
    bounds_us: Floats
    least_us: float
    whole: bool = False
    least_outside_us: float = inf

    @classmethod
    def of(cls, bounds: CutBounds, starts: Sequence[Ints], least_us: float, limits: Limits) -> _Pool:
        """All cuts where they are few, otherwise those that a local search from the starts meets."""
        if comb(bounds.layers - 1, bounds.stages - 1) <= MOST_ALL:
            cuts = _every_cut(bounds.layers, bounds.stages)
            keys, bounds_us = _keys(bounds, cuts)
            order = np.argsort(keys, kind="stable")
            kept, others = order[:POOL], order[POOL:]
            outside_us = float(bounds_us[others].min()) if len(others) else inf
            return cls(cuts[kept], bounds_us[kept], float(bounds_us.min()), True, outside_us)
        met = _local_search(bounds, starts, limits, KICKS)
        best = sorted(met, key=lambda cut: met[cut][0])[:POOL]
        bounds_us = np.array([met[cut][1] for cut in best])
        return cls(np.array(best), bounds_us, least_us)


@dataclass
class CutSearch:
    """Ratings of cuts. `best_us`: the least value; `least_us`: a bound on all cuts; `rated_ops`: of all those rated."""

    bounds: CutBounds
    build: Build
    limits: Limits
    alike: bool
    rated: dict[Sizes, QuickRating | None] = field(default_factory=dict)
    best_us: float = inf
    least_us: float = 0.0
    rated_ops: int = 0
    _starts: list[Ints] = field(default_factory=list)

    def begin(self) -> None:
        """Rate one good cut by one quick schedule of each kind; the count of what is looked at ends it, not time."""
        if not self.bounds.has_cuts:
            self.least_us = inf
        elif not self.limits.cancel.requested:
            tables = self.bounds.least()
            if self.alike:
                self.least_us = self.bounds.floor_us() if tables is None else tables[0]
            self._starts = [*_starts(self.bounds), *([tables[1]] if tables and len(tables[1]) else [])]
            met = _local_search(self.bounds, self._starts, self.limits, 0)
            for cut in sorted(met, key=lambda cut: met[cut][0])[: len(self._starts)]:
                self._rate(np.array([cut]), 1, 1)
                if self.best_us < inf:
                    break

    def extend(self, limits: Limits) -> None:
        """Search on within the limits, as far as a search has begun."""
        self.limits = limits
        if not self._starts or limits.cancel.requested:
            return
        pool = _Pool.of(self.bounds, self._starts, self.least_us, limits)
        for one in self.rated.values():
            if one is not None and not self.late:
                one.complete()
                self.best_us = min(self.best_us, one.value_us)
        self._rate(np.array(self._starts), MOST_RATED)
        self._rate(pool.cuts, MOST_RATED // 2)
        self._climb()
        if self.alike:
            self.least_us = max(self.least_us, self._bound_us(pool))

    @property
    def achieved_us(self) -> float:
        """The least value that is one of a schedule."""
        return self.best_us if self.alike else inf

    @property
    def found(self) -> FoundCuts:
        """The best cuts so far, and the bound on all."""
        return FoundCuts(self.best(KEPT), self.least_us)

    @property
    def late(self) -> bool:
        """True if the time is over. That of a small problem is its first `LEAST_OPS`, however busy the machine is."""
        over = self.limits.seconds >= self.limits.time_limit_s
        return self.limits.cancel.requested or (over and self.rated_ops >= LEAST_OPS)

    @property
    def spent(self) -> bool:
        """True if no other cut is to be rated."""
        return len(self.rated) >= MOST_RATED or (self.late and bool(self.rated))

    def _rate(self, cuts: Ints, most: int, lists: int = len(QUICK)) -> None:
        """Rate up to so many of these cuts that may still be better, in their order, by so many lists of each kind."""
        count, (_, bounds_us) = 0, _keys(self.bounds, cuts)
        for sizes, bound_us in zip(map(_sizes, cuts), bounds_us.tolist(), strict=True):
            if sizes in self.rated or (self.alike and bound_us >= self.best_us) or bound_us == inf:
                continue
            if count == most or self.spent:
                break
            count += 1
            problem = self.build(sizes)
            if problem is None or impossible_budgets(problem):
                self.rated[sizes] = None
                continue
            known_us = bound_us if self.alike else 0.0
            one = self.rated[sizes] = QuickRating.of(problem, self.limits.cancel, known_us, lists)
            self.rated_ops += count_ops(problem)
            self.best_us = min(self.best_us, one.value_us)
            if one.value_us <= CLOSE * self.best_us and lists == len(QUICK) and not self.late:
                one.bound_in_full()

    def _climb(self) -> None:
        """Improve the values of the best cuts and rate their neighbours, until none of the best has others.

        The best are those of the least values: where bounds are far below, these say less of what neighbours take.
        """
        done: set[Sizes] = set()
        while len(done) < (KEPT if self.spent else IMPROVED):
            near = sorted(self._able(), key=lambda rated: (rated[1].value_us, rated[1].bound_us))[:KEPT]
            ahead = [(sizes, one) for sizes, one in near if sizes not in done]
            if not ahead:
                return
            sizes, one = ahead[0]
            done.add(sizes)
            one.improve(replace(self.limits, time_limit_s=inf) if self.rated_ops < LEAST_OPS else self.limits)
            self.best_us = min(self.best_us, one.value_us)
            cuts = _moved(np.array(_cut(sizes)))
            keys, _ = _keys(self.bounds, cuts)
            self._rate(cuts[np.argsort(keys, kind="stable")], NEIGHBOURS)

    def best(self, count: int) -> dict[Sizes, QuickRating]:
        """The cuts with the least estimates of those that may still be the best, in their order."""
        return dict(sorted(self._able(), key=lambda rated: (rated[1].estimate_us, rated[1].bound_us))[:count])

    def _able(self) -> list[tuple[Sizes, QuickRating]]:
        """The rated cuts that may still be the best."""
        able = [(sizes, one) for sizes, one in self.rated.items() if one is not None]
        return [(sizes, one) for sizes, one in able if one.bound_us < self.best_us or one.value_us <= self.best_us]

    def _bound_us(self, pool: _Pool) -> float:
        """A bound on every schedule of every cut: closed forms, in full for those below the best value."""
        if not pool.whole:
            return pool.least_us
        least_us = min(pool.least_outside_us, self.best_us)
        bounds_us: list[float] = pool.bounds_us.tolist()
        for number, (cut, bound_us) in enumerate(zip(pool.cuts, bounds_us, strict=True)):
            if bound_us >= least_us:
                break
            sizes = _sizes(cut)
            if sizes in self.rated:
                one = self.rated[sizes]
                if one is not None:
                    if not self.late:
                        one.bound_in_full()
                    least_us = min(least_us, one.bound_us)
                continue
            problem = self.build(sizes) if number < REFINED and not self.late else None
            if problem is None:
                return min(least_us, bound_us)
            least_us = min(least_us, max(bound_us, lower_bound_us(problem)))
        return least_us


def _keys(bounds: CutBounds, cuts: Ints) -> tuple[Floats, Floats]:
    """For each cut a number to order it by, and its bound.

    The largest bound of a device decides, and then how far the others are below.
    """
    batches = [bounds.of(cuts[at : at + BATCH]) for at in range(0, len(cuts), BATCH)]
    of_device = np.concatenate([np.zeros((0, bounds.devices)), *batches])
    most = of_device.max(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = ((of_device / most[:, None]) ** STEEP).mean(axis=1)
    return np.where(most < inf, most * (1 + 0.01 * np.nan_to_num(mean)), inf), most


def _every_cut(layers: int, stages: int) -> Ints:
    """All cuts, one a row."""
    count = comb(layers - 1, stages - 1)
    inner = np.fromiter(chain.from_iterable(combinations(range(1, layers), stages - 1)), np.int64, count * (stages - 1))
    return _with_ends(inner.reshape(count, stages - 1), layers)


def _with_ends(inner: Ints, layers: int) -> Ints:
    return np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, layers)))


def _starts(bounds: CutBounds) -> list[Ints]:
    """Cuts by even numbers of layers, by even work, by even parameters, and between these."""
    apart = bounds.alone is True  # the last stage is no choice
    layers, stages = bounds.layers - apart, bounds.stages - apart
    even = np.arange(layers + 1) / layers
    work, parameters = (
        before[: layers + 1] / before[layers] if before[layers] else even
        for before in (bounds.work_before(), bounds.parameters_before())
    )
    starts = [np.array(_cut(even_cut(bounds)))]
    for before in (work, (work + parameters) / 2, parameters):
        inner = np.searchsorted(before, np.arange(1, stages) / stages)
        cut = _repaired(inner, layers, 2 if bounds.alone is False else 1)
        starts.append(np.append(cut, bounds.layers) if apart else cut)
    return starts


def _repaired(inner: Ints, layers: int, least_last: int) -> Ints:
    """A cut whose boundaries are near these, with a layer in each stage, and at least so many in the last."""
    stages = len(inner) + 1
    steps = np.arange(1, stages)
    inner = np.maximum.accumulate(np.maximum(inner, 1) - steps) + steps
    inner = np.minimum(inner, layers - least_last + 1 - stages + steps)
    return np.array([0, *inner, layers])


Met = dict[tuple[int, ...], tuple[float, float]]
"""Keys and bounds of cuts."""


def _local_search(bounds: CutBounds, starts: Sequence[Ints], limits: Limits, kicks: int) -> Met:
    """The cuts met on steepest descents from the starts, then from the best one changed at random `kicks` times.

    Time ends the latter alone.
    """
    rng, met = np.random.default_rng(0), Met()
    best, best_key = starts[0], inf
    for number in range(len(starts) + kicks):
        if number >= len(starts) and (limits.cancel.requested or limits.seconds > limits.time_limit_s):
            break
        cut = starts[number] if number < len(starts) else _kicked(best, rng)
        keys, bounds_us = _keys(bounds, cut[None])
        key = keys[0]
        met[tuple(cut.tolist())] = key, bounds_us[0]
        while True:
            moved = _moved(cut, _busiest(bounds, cut) if bounds.stages**2 > MOST_MOVES else None)
            if not len(moved):
                break
            keys, bounds_us = _keys(bounds, moved)
            near = np.argsort(keys, kind="stable")[:KEPT]
            met |= {tuple(moved[at].tolist()): (keys[at], bounds_us[at]) for at in near}
            if keys[near[0]] >= key * (1 - TOLERANCE):
                break
            cut, key = moved[near[0]], keys[near[0]]
        if key < best_key:
            best, best_key = cut, key
    return met


def _busiest(bounds: CutBounds, cut: Ints) -> Sequence[int]:
    """The stages of the device with the largest bound; of one that is overfull where some are."""
    device = int(np.argmax(bounds.of(cut[None])[0]))
    return [s for s, place in enumerate(bounds.placement) if place == device]


def _kicked(cut: Ints, rng: np.random.Generator) -> Ints:
    """The cut with a few layers moved between random stages."""
    for _ in range(3):
        moved = _moved(cut)
        if len(moved):
            cut = moved[rng.integers(len(moved))]
    return cut


def _moved(cut: Ints, stages: Sequence[int] | None = None) -> Ints:
    """Cuts in which one layer has moved from one stage to another; given `stages`, from or to one of these.

    The stages between the two each hand one layer on.
    """
    count = len(cut) - 1
    source, target = np.meshgrid(np.arange(count), np.arange(count), indexing="ij")
    apart = source != target
    if stages is not None:
        apart &= np.isin(source, stages) | np.isin(target, stages)
    source, target = source[apart], target[apart]
    at = np.arange(count + 1)
    right = (at > source[:, None]) & (at <= target[:, None])
    left = (at > target[:, None]) & (at <= source[:, None])
    moved = cut - right.astype(np.int64) + left
    whole: Ints = moved[(np.diff(moved, axis=1) > 0).all(axis=1)]
    return whole


def _cut(sizes: Sizes) -> list[int]:
    return [0, *accumulate(sizes)]


def _sizes(cut: Ints) -> Sizes:
    return tuple(np.diff(cut).tolist())
