"""Times as integers for solvers that need them, without losing the truth about optimality.

Durations become whole ticks. Where they are all multiples of one tick the model is exact. Where they are not (or a
tick would be absurdly small) they are rounded down, which only lets schedules become shorter: the model's bound
stays a bound, and orders are timed with the true durations in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, lcm

from optpipe.problem import Problem

MAX_HORIZON_TICKS = 2**40
"""Beyond this, sums in the solvers come near the limits of their integers."""


@dataclass(frozen=True)
class Grid:
    """`ticks_per_us`, and whether every duration is a whole number of ticks.

    `step` is how many ticks make one step of the coarsest grid on which an optimum lies. It is above 1 where ops have
    no length: these get one tick, so that ops at one instant have an order, and `step` exceeds their number, so that
    all of them together stay below a step.
    """

    ticks_per_us: Fraction
    exact: bool
    step: int = 1

    @classmethod
    def of(cls, problem: Problem, horizon_us: float) -> Grid:
        """The grid of a problem whose schedules of interest end by `horizon_us`.

        With the objective makespan and whole durations some optimum has whole times. With device_span it need not:
        the smallest span of given orders is a mean over at most p devices (`optpipe.spans`), a fraction with
        denominator up to p. Two such fractions differ by at least 1 / p^2, so on a grid p^2 times finer, where
        rounding times to the grid costs less than one step, a proved optimum is the true one.
        """
        steps = Fraction(lcm(*(Fraction(str(value)).denominator for value in _times_us(problem))))
        steps *= len(problem.devices) ** 2 if problem.objective == "device_span" else 1
        step = 1 + _instant_ops(problem, 0)
        if steps * step * Fraction(horizon_us) <= MAX_HORIZON_TICKS:
            return cls(steps * step, True, step)
        coarse = Fraction(max(1, floor(MAX_HORIZON_TICKS / max(1.0, horizon_us))))
        return cls(coarse, False, 1 + _instant_ops(problem, float(1 / coarse)))

    def ticks(self, time_us: float) -> int:
        """A delay or bound in ticks, rounded down where it is not whole."""
        return floor(Fraction(str(time_us)) * self.ticks_per_us)

    def ticks_up(self, time_us: float) -> int:
        """A time in ticks, rounded up."""
        return -floor(-Fraction(str(time_us)) * self.ticks_per_us)

    def length(self, duration_us: float) -> int:
        """The length of an op in ticks, at least one."""
        return max(self.ticks(duration_us), 1)

    def horizon(self, horizon_us: float) -> int:
        """A horizon in ticks, with room for the ops that have no length."""
        return self.ticks_up(horizon_us) + self.step - 1

    def us(self, ticks: float) -> float:
        """Ticks as microseconds."""
        return float(Fraction(ticks) / self.ticks_per_us)

    def bound_us(self, problem: Problem, bound_ticks: float, value_us: float) -> float:
        """What a proved lower bound in ticks says about real-valued times, given the best value known.

        Ops without length add less than one step to a makespan, which is a whole number of steps. For device_span
        they and rounding down to ticks together add at most one step; where what is left leaves no fraction below
        the value, the value is optimal.
        """
        if problem.objective == "makespan":
            proved = Fraction(bound_ticks) - (self.step - 1)
            return self.us(ceil(proved / self.step) * self.step if self.exact else floor(proved))
        floor_us = self.us(bound_ticks - self.step)
        nearest_below_us = value_us - self.us(self.step)
        return value_us if self.exact and floor_us >= nearest_below_us - 1e-9 * abs(value_us) else floor_us


def _instant_ops(problem: Problem, below_us: float) -> int:
    """How many ops take `below_us` or less."""
    kinds = [(stage, kind) for stage in problem.stages for kind in ("FBWOR" if stage.offload else "FBW")]
    return problem.microbatches * sum(stage.duration_us(kind) <= below_us for stage, kind in kinds)


def _times_us(problem: Problem) -> Iterator[float]:
    yield from problem.forward_delay_us
    yield from problem.backward_delay_us
    for stage in problem.stages:
        yield from (stage.forward_us, stage.backward_input_us, stage.backward_weight_us)
        if stage.offload:
            yield from (stage.offload.offload_us, stage.offload.reload_us)
