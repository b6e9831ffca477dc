"""Whether a schedule that was found is better than the one in use, and whether it was once it ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate

STEPS_BEFORE = 20
"""The last steps before a swap, against which it is judged, at most."""

FIRST_STEPS = 2
"""After a swap these do not count: host buffers take on their sizes, memory is got."""

STEPS_AFTER = 5
"""Then so many decide."""


@dataclass(frozen=True)
class Choice:
    """The step that both schedules predict with the newest times, in microseconds."""

    in_use_us: float
    found_us: float
    least_gain: float

    @property
    def gain(self) -> float:
        """The share of the step in use that the found one saves; negative if it takes longer."""
        return 1 - self.found_us / self.in_use_us if self.in_use_us else 0.0

    @property
    def better(self) -> bool:
        """Whether it saves something, and enough."""
        return self.gain > 0 and self.gain >= self.least_gain


def choose(problem: Problem, in_use: Schedule, found: Schedule, least_gain: float) -> Choice:
    """Time both schedules' orders with the costs of a problem."""
    in_use_us, found_us = (simulate(problem, schedule.orders).value_us for schedule in (in_use, found))
    return Choice(in_use_us, found_us, least_gain)


class Trial:
    """The first steps with a new schedule, against the last with the one before: seconds of each."""

    def __init__(self, before_seconds: Sequence[float]) -> None:
        self._before = list(before_seconds)[-STEPS_BEFORE:]
        self._after: list[float] = []

    def add(self, seconds: float) -> None:
        """One more step with the new schedule."""
        self._after.append(seconds)

    @property
    def over(self) -> bool:
        """Whether enough steps are known."""
        return len(self._counted) >= STEPS_AFTER

    @property
    def figures(self) -> str:
        """The medians of both, in words."""
        after = f"{median(self._counted):.3f} s after the change"
        return f"steps take {after}, {median(self._before):.3f} s before it" if self._before else f"steps take {after}"

    @property
    def worse(self) -> bool:
        """Whether steps became longer, beyond what they differed by before: more than half of the new ones take longer
        than three quarters of the old ones.
        """
        if len(self._before) < STEPS_AFTER:
            return False
        return median(self._counted) > quantiles(self._before, n=4, method="inclusive")[2]

    @property
    def _counted(self) -> list[float]:
        return self._after[FIRST_STEPS:]
