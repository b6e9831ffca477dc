"""Good ends for a pattern: a small local search over how far ahead of its plan each pass may run.

It plays few microbatches, just enough for a warm-up, a cool-down and some rounds between, so that its time does not
depend on how many there are. The same ends then serve for any number.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np

from solver.search.pattern.block import Pattern
from solver.search.pattern.ends import Ends, Filler
from solver.search.pattern.passes import Ints, Passes

EARLY = (0, 2, 9)
PATIENCE = (0.0, 0.5)
"""What is tried first, for all passes alike."""

FIRST_PLAYS = len(EARLY) * len(PATIENCE)

MOST_EARLY = 12

SLACK = 1e-4
"""Share of the value by which a step may be worse at the begin of a search."""


def few_microbatches(pattern: Pattern, microbatches: int) -> int:
    """So many microbatches that both ends of the schedule are there in full, as many as rounds allow."""
    lanes = pattern.passes.lanes
    enough = 2 * pattern.in_flight + 4 * lanes
    return microbatches if microbatches <= enough else enough + (microbatches - enough) % lanes


def first_ends(filler: Filler) -> tuple[float, Ends]:
    """The best of a few simple ends, with its value in us."""
    shape = (2, filler.passes.size)
    tried = [Ends(np.full(shape, early, np.int64), patience) for early, patience in product(EARLY, PATIENCE)]
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
        other = _changed(current[1], filler.passes, rng)
        value = filler.value_us(other)
        if value <= current[0] * (1 + SLACK * (1 - step / steps)):
            current = (value, other)
            best = min(best, current, key=lambda pair: pair[0])
    return best


def _changed(ends: Ends, passes: Passes, rng: np.random.Generator) -> Ends:
    """Up to three changes: of one pass, of one kind on neighbouring stages, or of a device."""
    early = ends.early.copy()
    for _ in range(int(rng.integers(1, 4))):
        early[rng.integers(2), _group(passes, rng)] = rng.integers(MOST_EARLY)
    return Ends(early, float(rng.choice(PATIENCE)) if rng.random() < 0.1 else ends.patience)


def _group(passes: Passes, rng: np.random.Generator) -> Ints:
    way = rng.random()
    if way < 0.4:
        return rng.integers(passes.size, size=1)
    if way < 0.8:
        first = int(rng.integers(passes.stages))
        last = min(passes.stages, first + 1 + int(rng.integers(passes.stages)))
        return int(rng.integers(3)) * passes.stages + np.arange(first, last)
    return passes.of_device(int(rng.integers(passes.devices)))
