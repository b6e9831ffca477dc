"""What bounds that argue about one device have in common: its stages, its budget, and the ways that lead to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from optpipe.problem import Problem, Stage
from solver.bounds.budgets import usable_bytes
from solver.bounds.paths import Paths


@dataclass(frozen=True)
class OnDevice:
    """The device that holds the stages `numbers`, with the `paths` of the whole problem."""

    problem: Problem
    paths: Paths
    numbers: Sequence[int]

    @classmethod
    def each(cls, problem: Problem) -> Sequence[Self]:
        """Of every device that has stages."""
        paths = Paths.of(problem)
        return [cls(problem, paths, numbers) for numbers in problem.stages_of if numbers]

    @cached_property
    def stages(self) -> Sequence[Stage]:
        """The stages of this device, first to last."""
        return [self.problem.stages[s] for s in self.numbers]

    @cached_property
    def budget(self) -> float:
        """The bytes that can be used here; infinite without a budget."""
        return usable_bytes(self.problem, self.stages[0].device)

    def value_us(self, span_us: float, to_last_backward_us: float) -> float:
        """What the objective is at least, from two bounds: on the device's span, and on that up to its last backward.

        The device of stage 0 begins earlier by the way to this device, and after its last backward the gradient still
        passes the way back, and W of stage 0. For the makespan the device's own span begins after that way as well.
        """
        low = self.numbers[0]
        head_us, tail_us = self.paths.forward_before[low], self.paths.backward_before[low]
        through_us = head_us + to_last_backward_us + tail_us + self.problem.stages[0].backward_weight_us
        return max(through_us, span_us + (head_us if self.problem.objective == "makespan" else 0))
