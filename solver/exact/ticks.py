"""Times as integers for solvers that need them, without losing the truth about optimality.

Durations become whole ticks. Where they are all multiples of one tick the model is exact. Where they are not (or a
tick would be absurdly small) they are rounded down, which only lets schedules become shorter: the model's bound
stays a bound, and orders are timed with the true durations in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

import numpy as np

from optpipe.problem import Problem
from optpipe.task_graph import lower
from solver.scale import MAX_STEPS, stage_times_us, time_unit_us

ROUNDING = Fraction(1, 10**11)
"""The share by which a bound made of float sums may be too high."""


@dataclass(frozen=True)
class TimeGrid:
    """`ticks_per_us`, and whether every duration is a whole number of ticks.

    `step` is how many ticks make one step of the grid on which ops with a length lie. It is above 1 where ops have
    no length: these get one tick, so that ops at one instant have an order, and `step` exceeds their number, so that
    all of them together stay below a step. `refinement` is how many steps make the unit: the largest time of which
    all durations are multiples. Values are whole multiples of a unit's j-th part for some j up to `parts`.
    """

    ticks_per_us: Fraction
    exact: bool
    step: int = 1
    refinement: int = 1
    parts: int = 1

    @classmethod
    def of(cls, problem: Problem, horizon_us: float, refinement: int = 1) -> TimeGrid:
        """The grid of a problem whose schedules of interest end by `horizon_us`.

        With the objective makespan some optimum has whole multiples of the unit. With device_span it need not: the
        smallest span of given orders is a mean over at most p devices (`optpipe.simulate`), so p parts are possible,
        and a proof may need a `refinement` (see `refinement_for`).
        """
        unit_us = time_unit_us(problem)
        spans = problem.objective == "device_span"
        parts = sum(1 for stages in problem.stages_of if stages) if spans else 1
        step = 1 + _instant_ops(problem, 0)
        ticks_per_us = refinement * step / unit_us
        if ticks_per_us * Fraction(horizon_us) <= MAX_STEPS:
            return cls(ticks_per_us, True, step, refinement, parts)
        coarse = Fraction(max(1, floor(MAX_STEPS / max(1.0, horizon_us))))
        return cls(coarse, False, 1 + _instant_ops(problem, float(1 / coarse)))

    def ticks(self, time_us: float) -> int:
        """A delay or bound in ticks, rounded down where it is not whole."""
        return floor(Fraction(str(time_us)) * self.ticks_per_us)

    def ticks_up(self, time_us: float) -> int:
        """A time in ticks, rounded up."""
        return -floor(-Fraction(str(time_us)) * self.ticks_per_us)

    def bound_ticks(self, bound_us: float) -> int:
        """A bound on values in ticks, rounded up but for what float sums may have added to it."""
        return (
            ceil(Fraction(str(bound_us)) * (1 - ROUNDING) * self.ticks_per_us) if self.exact else self.ticks(bound_us)
        )

    def length(self, duration_us: float) -> int:
        """The length of an op in ticks, at least one."""
        return max(self.ticks(duration_us), 1)

    def horizon(self, horizon_us: float) -> int:
        """A horizon in ticks, with room for the ops that have no length."""
        return self.ticks_up(horizon_us) + self.step - 1

    def us(self, ticks: float) -> float:
        """Ticks as microseconds."""
        return float(Fraction(ticks) / self.ticks_per_us)

    def proved_us(self, bound_ticks: float) -> float:
        """Translate a lower bound on the model's objective (ticks) to real schedules.

        A makespan of whole units is the model's, but for the ops without length, which add less than one step. A span
        S that is moved to the grid, every time rounded down to a step, becomes at most S rounded up to a step: where
        the model has none of `bound_ticks - 1`, that is above it. The value is then the least multiple of a unit's part
        that is large enough.
        """
        if not self.exact:
            return self.us(floor(bound_ticks) - (self.step if self.parts > 1 else self.step - 1))
        steps = ceil((Fraction(ceil(bound_ticks)) - self.step + 1) / self.step)
        units = Fraction(steps - 1, self.refinement)
        parts = range(1, self.parts + 1)
        return self._units_us(min(Fraction(floor(units * part) + 1, part) for part in parts))

    def raised_us(self, bound_us: float) -> float:
        """The least value that schedules can have at or above a bound that holds for all (up to its rounding)."""
        if not self.exact:
            return bound_us
        units = Fraction(bound_us) * (1 - ROUNDING) * self.ticks_per_us / (self.step * self.refinement)
        least = min(Fraction(ceil(units * part), part) for part in range(1, self.parts + 1))
        return max(bound_us, self._units_us(least))

    def refinement_for(self, value_us: float) -> int:
        """The refinement with which a model that has nothing better than `value_us` proves it optimal.

        The value is a multiple of a unit's j-th part, any other one of a k-th part with k at most p: if smaller, it is
        so by at least 1 / (j p) of a unit. On a grid of j p steps a unit the value is whole, and a schedule less by
        a step would be one of the model.
        """
        units = Fraction(value_us) * self.ticks_per_us / (self.step * self.refinement)
        return units.limit_denominator(self.parts).denominator * self.parts

    def _units_us(self, units: Fraction) -> float:
        return float(units * self.step * self.refinement / self.ticks_per_us)


def _instant_ops(problem: Problem, below_us: float) -> int:
    """Most ops that take `below_us` or less, whatever the modes."""
    counts = np.bincount(problem.unit_class).tolist()
    of_stages = sum(
        count * sum(time_us <= below_us for time_us in stage_times_us(stage))
        for of_classes in problem.unit_stages
        for count, stage in zip(counts, of_classes, strict=True)
    )
    of_passes = [int((one.duration_us <= below_us).sum(axis=0) @ counts) for one in lower(problem).passes]
    return int(of_stages) + sum(of_passes)
