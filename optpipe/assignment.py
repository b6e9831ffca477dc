"""Assignment of unequal microbatches to the places of a schedule, for sizes that change with every step.

A schedule has a place for each of its microbatches. Where sizes are others in every step, its orders stay as they are,
and with them the program that devices run; which microbatch runs in which place is decided anew. Nothing is compiled,
and no process tells another: the decision follows from the sizes by integer arithmetic and a seed, so that all find the
same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from random import Random

import numpy as np
from numba import njit

from optpipe.ops import Orders
from optpipe.problem import Floats, Ints, Problem
from optpipe.simulate import UnitTimes
from optpipe.stage import UnitFactors

CLUSTERS = 3
"""Clusters of similar microbatches, of which every order is tried."""

CHANGES = 48
"""Changes that are tried after the likely orders, for each microbatch."""

MOST_OPS = 4_500_000
"""Most ops that are timed for changes: some 70 ms of a processor."""

PATIENCE = 20
"""Late acceptance: a change is kept if it is no worse than what was kept so many changes ago (Burke, Bykov 2017)."""

PER_UNIT = 10**6
"""Factors of bytes are counted in millionths."""

SIZE = UnitFactors._fields.index("bytes")
"""Row of the factors of bytes among those of microbatches."""


def likely_orders(times: Sequence[float]) -> Mapping[str, Sequence[int]]:
    """Orders to begin with of microbatches that take these times, by name.

    Which order is best depends on where the bubbles are: ascending and descending ones, those that rise and fall, and
    clusters of similar microbatches one after another (DynaPipe, EuroSys 2024).
    """
    values = np.asarray(times, np.float64)
    up = np.argsort(values, kind="stable")
    found = {
        "ascending": up,
        "descending": up[::-1],
        "rising and falling": np.concatenate([up[::2], up[1::2][::-1]]),
        "falling and rising": np.concatenate([up[::2][::-1], up[1::2]]),
    }
    # By time, in parts of equal range; in a cluster microbatches stay as given.
    edges = np.linspace(values.min(), values.max(), CLUSTERS + 1)[1:-1]
    clusters = [np.flatnonzero(np.searchsorted(edges, values) == k) for k in range(CLUSTERS)]
    for numbers in permutations(range(CLUSTERS)):
        found[f"clusters {numbers}"] = np.concatenate([clusters[k] for k in numbers])
    return {name: order.tolist() for name, order in found.items()}


@dataclass(frozen=True)
class MemorySteps:
    """Changes of a device's memory in the order of its program: of which unit, and bytes at factor 1."""

    unit: Ints
    change_bytes: Ints
    budget_bytes: int


@njit(cache=True)
def _highest_sum(unit: Ints, change: Ints, factors: Ints) -> int:
    """Highest level of changes, each times the factor of its unit."""
    level = highest = 0
    for k in range(len(unit)):
        level += change[k] * factors[unit[k]]
        highest = max(highest, level)
    return highest


class Places:
    """Places of the microbatches of a problem in orders of it.

    `memory`: of the devices that have a budget. The times, sizes and transfers of the problem are those of a microbatch
    with factor 1; its own factors are left out.
    """

    def __init__(self, problem: Problem, orders: Orders, memory: Sequence[MemorySteps] = ()) -> None:
        self._run = list(orders.microbatch_order or range(problem.microbatches))
        self._planned_us = problem.microbatch_work_us
        alike = problem.replaced(microbatch_factors=None, microbatch_order="free")
        self._times = UnitTimes(alike, orders)
        self._memory = memory

    def value_us(self, factors: Floats, places: Sequence[int]) -> float:
        """Predicted value of the schedule's objective with microbatch `places[k]` in place k.

        `factors`: a row for each field of `UnitFactors`, with an entry for every microbatch.
        """
        return self._times.value_us(factors[:, list(places)])

    def excess_bytes(self, factors: Floats, places: Sequence[int]) -> int:
        """Most bytes by which a device would exceed its budget; 0 if none would."""
        if not self._memory:
            return 0
        millionths = np.rint(factors[SIZE] * PER_UNIT).astype(np.int64)[list(places)]
        return max(
            0,
            *(
                -(-_highest_sum(device.unit, device.change_bytes, millionths) // PER_UNIT) - device.budget_bytes
                for device in self._memory
            ),
        )

    def assign(self, factors: Floats, changes: int | None = None) -> Sequence[int]:
        """Find the microbatch for each place: within the budgets if possible, then with the least value.

        Likely orders first, then late-acceptance hill climbing with a fixed seed and as many changes (None: `CHANGES`
        for each microbatch, within `MOST_OPS`).
        """
        m = len(self._run)
        if changes is None:
            changes = min(CHANGES * m, MOST_OPS // self._times.size)

        def of_running(order: Sequence[int]) -> list[int]:
            places = [0] * m
            for place, microbatch in zip(self._run, order, strict=True):
                places[place] = microbatch
            return places

        def judged(order: Sequence[int]) -> tuple[int, float]:
            places = of_running(order)
            return self.excess_bytes(factors, places), self.value_us(factors, places)

        best = min(self._starts(self._times.work_us(factors)), key=judged)
        best_value = value = judged(best)
        order, late, rng = list(best), [value] * PATIENCE, Random(0)
        for k in range(changes if m > 1 else 0):
            i, j = rng.sample(range(m), 2)
            changed = order.copy()
            if rng.random() < 0.5:
                changed[i], changed[j] = changed[j], changed[i]
            else:
                changed.insert(j, changed.pop(i))
            places, most = of_running(changed), max(value, late[k % PATIENCE])
            found_us = self.value_us(factors, places)
            if (0, found_us) <= most and (found := (self.excess_bytes(factors, places), found_us)) <= most:
                order, value = changed, found
                if value < best_value:
                    best, best_value = order, value
            late[k % PATIENCE] = value
        return of_running(best)

    def _starts(self, times_us: Floats) -> Iterator[Sequence[int]]:
        """Running orders to begin with: as given, by the ranks of the planned times, and the likely ones."""
        yield range(len(times_us))
        ranked = [0] * len(times_us)
        for place, microbatch in zip(
            np.argsort(self._planned_us, kind="stable"), np.argsort(times_us, kind="stable"), strict=True
        ):
            ranked[place] = int(microbatch)
        yield [ranked[place] for place in self._run]
        yield from likely_orders(times_us.tolist()).values()
