"""The way of one microbatch through the pipeline, which no schedule makes shorter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from optpipe.problem import Problem

Time = int | float


@dataclass(frozen=True)
class Paths:
    """Times (us) along one microbatch's chain of F and B, from any stage to any other.

    Entry s of each sequence is what comes before stage s (`*_before`) or from stage s on (`*_from`): F and the delays
    of activations, or B and the delays of gradients. Sequences `*_from` have one entry more, the last is 0.
    """

    forward_before: Sequence[Time]
    forward_from: Sequence[Time]
    backward_before: Sequence[Time]
    backward_from: Sequence[Time]
    activations_from: Sequence[Time]
    gradients_from: Sequence[Time]

    @classmethod
    def of(cls, problem: Problem) -> Self:
        """All sums for a problem, each made once."""
        forward = [stage.forward_us for stage in problem.stages]
        backward = [stage.backward_input_us for stage in problem.stages]
        activations, gradients = [*problem.forward_delay_us, 0], [*problem.backward_delay_us, 0]
        return cls(
            forward_before=_sums_before(a + b for a, b in zip(forward, activations, strict=True)),
            forward_from=_sums_from(forward),
            backward_before=_sums_before(a + b for a, b in zip(backward, gradients, strict=True)),
            backward_from=_sums_from(backward),
            activations_from=_sums_from(activations),
            gradients_from=_sums_from(gradients),
        )

    def turnaround_us(self, forward: int, backward: int) -> Time:
        """The least time from the end of F of stage `forward` to the start of B of stage `backward`.

        All F that follow, all B that come before, and the delays between them. A fused backward only makes it longer.
        """
        there = self.forward_from[forward + 1] + self.activations_from[forward]
        return there + self.backward_from[backward + 1] + self.gradients_from[backward]


def _sums_before(times: Iterable[Time]) -> Sequence[Time]:
    return list(accumulate(times, initial=0))[:-1]


def _sums_from(times: Sequence[Time]) -> Sequence[Time]:
    return list(accumulate(reversed(times), initial=0))[::-1]


def longest_chain_us(problem: Problem) -> float:
    """One microbatch alone: F through all stages, B back through all, then the W of the first stage.

    A bound on the makespan; on the span of the device of the first stage too, since that chain begins and ends there.
    """
    first = problem.stages[0]
    there_and_back = Paths.of(problem).turnaround_us(0, 0)
    return first.forward_us + there_and_back + first.backward_input_us + first.backward_weight_us
