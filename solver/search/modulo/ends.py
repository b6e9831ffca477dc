"""Prologue and epilogue (warm-up and cool-down) of a repeated block.

The pattern's order is a plan for every device (`solver.plan_player`). A pass may run some rounds ahead of its plan, a
number for each pass and each end: `tuned_ends` searches over these numbers, and over the time from which W wait for the
cool-down. In between the plan is followed as it is.

Few microbatches are played, just enough for a warm-up, a cool-down and some rounds between, so that the time does not
depend on how many there are. The same ends then serve for any number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from optpipe.ops import Ints
from solver.plan_player import PassCosts, PlanPlayer
from solver.search.modulo.pattern import Pattern


@dataclass(frozen=True)
class Ends:
    """Deviation of a schedule's ends from its pattern.

    `early[e, p]`: rounds that pass p may run ahead of its plan in the warm-up (e = 0) and the cool-down (e = 1).
    `delay_share`: the share of a pass's time by which it may delay the planned one, where the input of that one is
    known to come. Once a device has no more than ``weights_last[d]`` forwards left, its W come behind all else that
    fits: so the last backwards leave it at the pace of F and B alone, and W are left to fill the cool-down with.
    """

    early: Ints
    delay_share: float
    weights_last: Ints


class Filler(PlanPlayer):
    """Plays a pattern for a number of units with different ends.

    Where lanes are alike it plays passes of a single lane and microbatches, else those of all lanes and rounds.
    """

    def __init__(self, pattern: Pattern, passes: PassCosts, units: int, budgets: Ints, by_span: bool) -> None:
        """`passes` are those that are played; `by_span`: the objective is the largest span of a device."""
        self.units = units
        self.lanes = pattern.passes.lanes if pattern.passes.ordered else 1
        super().__init__(passes, pattern.plan(units), -(-units // self.lanes), budgets)
        self.by_span = by_span
        self.end = pattern.in_flight // self.lanes + 1

    @property
    def cool_down(self) -> Ints:
        """For each device the number of forwards in the cool-down."""
        return self.forwards(min(self.end, self.microbatches))

    def value_us(self, ends: Ends) -> float:
        """The objective with these ends, infinity where there are no orders (`PlanPlayer.play`)."""
        return self.play(ends.early, self.end, ends.delay_share, ends.weights_last, self.by_span)

    def orders(self, ends: Ends) -> list[tuple[Ints, Ints]]:
        """For each device the passes in the order in which it runs them, as those of one lane, and their units."""
        self.value_us(ends)
        count = self.passes.stages // self.lanes
        orders = []
        for passes, turn in self.played():
            kind, stage = np.divmod(passes, self.passes.stages)
            orders.append((kind * count + stage % count, turn * self.lanes + stage // count))
        return orders


EARLY = (0, 2, 9)
DELAY_SHARES = (0.0, 0.5)
"""Values tried first, for all passes alike, while W keep their places."""

WEIGHTS_LAST = (0.5, 1.0)
"""Shares of each device's forwards in the cool-down that are left when its W begin to wait, tried next."""

FIRST_PLAYS = len(EARLY) * len(DELAY_SHARES) + len(WEIGHTS_LAST)
"""Number of times `first_ends` plays a pattern."""

EARLY_BELOW = 12
"""Rounds that a step lets passes run ahead of their plan are fewer than this."""

WEIGHTS_LAST_CHANGES = 0.2
"""Share of the steps that change `Ends.weights_last`."""

SLACK = 1e-4
"""Share of the value by which a step may be worse at the beginning of a search."""


def few_units(pattern: Pattern, units: int) -> int:
    """Number of units with which both ends of the schedule are complete, as many as rounds allow."""
    lanes = pattern.passes.lanes
    enough = 2 * pattern.in_flight + 4 * lanes
    return units if units <= enough else enough + (units - enough) % lanes


def first_ends(filler: Filler) -> tuple[float, Ends]:
    """The best of a few simple ends, with its value in us."""
    ahead, never = np.ones((2, filler.passes.size), np.int64), np.zeros_like(filler.cool_down)
    value, ends = _best(filler, [Ends(early * ahead, share, never) for early, share in product(EARLY, DELAY_SHARES)])
    deferring = [np.floor(share * filler.cool_down).astype(np.int64) for share in WEIGHTS_LAST]
    other = _best(filler, [replace(ends, weights_last=weights_last) for weights_last in deferring])
    return min((value, ends), other, key=lambda pair: pair[0])


def _best(filler: Filler, tried: list[Ends]) -> tuple[float, Ends]:
    """The best of these ends, with its value in us."""
    values = [filler.value_us(ends) for ends in tried]
    best = int(np.argmin(values))
    return values[best], tried[best]


def tuned_ends(
    filler: Filler, ends: Ends, steps: int, rng: np.random.Generator, stopped: Callable[[], bool]
) -> tuple[float, Ends]:
    """The best ends of a random walk of so many steps from given ones, with their value in us.

    A step is taken unless it is worse by more than a slack that falls to 0 (threshold accepting, Dueck and Scheuer
    1990): many changes leave the value as it is, and only several together gain.
    """
    current = best = (filler.value_us(ends), ends)
    for step in range(steps):
        if stopped():
            break
        other = _neighbour(current[1], filler, rng)
        value = filler.value_us(other)
        if value <= current[0] * (1 + SLACK * (1 - step / steps)):
            current = (value, other)
            best = min(best, current, key=lambda pair: pair[0])
    return best


def _neighbour(ends: Ends, filler: Filler, rng: np.random.Generator) -> Ends:
    """Other ends: W last sooner or later on neighbouring devices, or up to three groups of passes earlier or later."""
    if rng.random() < WEIGHTS_LAST_CHANGES:
        weights_last = ends.weights_last.copy()
        first = int(rng.integers(len(weights_last)))
        last = first + 1 + int(rng.integers(len(weights_last) - first))
        weights_last[first:last] = np.floor(rng.random() * (filler.cool_down[first:last] + 1))
        return replace(ends, weights_last=weights_last)
    passes, early = filler.passes, ends.early.copy()
    for _ in range(int(rng.integers(1, 4))):
        rounds, end, which = rng.integers(EARLY_BELOW), rng.integers(2), rng.random()
        if which < 0.4:
            group = rng.integers(passes.size, size=1)
        elif which < 0.8:  # those of one kind on neighbouring stages
            first = int(rng.integers(passes.stages))
            last = min(passes.stages, first + 1 + int(rng.integers(passes.stages)))
            group = int(rng.integers(3)) * passes.stages + np.arange(first, last)
        else:  # those of a device
            group = np.flatnonzero(passes.device == rng.integers(passes.devices))
        early[end, group] = rounds
    delay_share = float(rng.choice(DELAY_SHARES)) if rng.random() < 0.1 else ends.delay_share
    return replace(ends, early=early, delay_share=delay_share)
