"""Runs whose seconds are compared: nothing is loaded or compiled in them, and each says when it is done."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.section import say
from optpipe.problem import Problem
from solver.bench.measure import Measured, measure
from solver.limits import Limits
from tests.problems import HALF, uniform


def warm_up(methods: Sequence[str]) -> None:
    """Load and compile what the methods need at first use."""
    for method in methods:
        measure(uniform(2, 2, budget=4, offload=HALF), method, Limits(1))


def run(name: str, problem: Problem, method: str, time_limit_s: float) -> Measured:
    """One run on all cores. Ctrl-C ends the whole measurement: half a table would mislead."""
    measured = measure(problem, method, Limits(time_limit_s))
    if measured.interrupted:
        raise KeyboardInterrupt
    figures = measured.figures
    say(f"{name}  {method}  {measured.seconds:.1f} s  {figures.value_us if figures else measured.why_not}")
    return measured
