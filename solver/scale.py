"""The unit of a problem's times: the largest of which all of them are multiples."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import gcd, lcm

from optpipe.problem import Problem, Stage

MAX_STEPS = 2**45
"""How many steps of a grid of time are told apart: floats keep them, and sums in solvers stay far from 64 bits."""


def value_step_us(problem: Problem) -> float:
    """The least by which two values of a problem can differ.

    Makespans are multiples of the unit. The least span of given orders is a mean over at most as many terms as devices
    (`optpipe.spans`): a multiple of the unit's j-th part, and two of them differ by a j k-th part at least.
    """
    devices = sum(1 for stages in problem.stages_of if stages)
    return float(time_unit_us(problem) / (devices**2 if problem.objective == "device_span" else 1))


def time_unit_us(problem: Problem) -> Fraction:
    """The largest time of which all durations and delays of a problem are multiples (1 where none has a length)."""
    stages = [time for stage in problem.stages for time in stage_times_us(stage)]
    times = [*stages, *problem.forward_delay_us, *problem.backward_delay_us]
    return _common_divisor(Fraction(str(time)) for time in times)


def stage_times_us(stage: Stage) -> list[float]:
    """How long F, B and W take, and O and R where the stage may offload."""
    moves = [stage.offload.offload_us, stage.offload.reload_us] if stage.offload else []
    return [stage.forward_us, stage.backward_input_us, stage.backward_weight_us, *moves]


def _common_divisor(times: Iterable[Fraction]) -> Fraction:
    lengths = [time for time in times if time]
    if not lengths:
        return Fraction(1)
    return Fraction(gcd(*(time.numerator for time in lengths)), lcm(*(time.denominator for time in lengths)))
