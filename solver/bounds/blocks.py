"""A relaxation of problems with blocks (`Problem.overlaps`): ops apart, each shorter by its share of what blocks save.

A block of F and BW that takes T saves ``F + BW - T``. Let each forward be shorter by its share of the most that a block
with it saves, and each backward likewise; then a block is at least as long as its two shortened ops one after the
other. Put there, they keep every rule, since F ends no later and BW begins no earlier, and hold no more memory. So any
schedule is one of the relaxation too, of at most the same value. With factors the shortened ops grow with their own
units and the block with the larger, so that this stays true.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

from optpipe.problem import Problem
from optpipe.stage import exact


def without_blocks(problem: Problem) -> Problem:
    """The problem in which all ops run apart."""
    return problem.replaced(overlaps=None)


def block_relaxation(problem: Problem) -> Problem:
    """The relaxation. A bound on it, from whatever search, is one on the problem."""
    return problem.derived(_relaxed)


def _relaxed(problem: Problem) -> Problem:
    shorter: dict[tuple[str, int], Fraction] = defaultdict(Fraction)
    for (f, b), time_us in problem.block_us.items():
        parts = {
            ("F", f): exact(problem.stages[f].duration_us("F")),
            ("BW", b): exact(problem.stages[b].duration_us("BW")),
        }
        total = sum(parts.values())
        saved = total - exact(time_us)
        for op, own in parts.items():
            shorter[op] = max(shorter[op], saved * own / total if total else Fraction(0))
    stages = []
    for s, stage in enumerate(problem.stages):
        whole = exact(stage.duration_us("BW"))
        left = 1 - shorter["BW", s] / whole if whole else Fraction(1)
        times = {
            "forward_us": exact(stage.forward_us) - shorter["F", s],
            "backward_input_us": exact(stage.backward_input_us) * left,
            "backward_weight_us": exact(stage.backward_weight_us) * left,
        }
        stages.append(stage.replaced(**{name: _rounded_down(time) for name, time in times.items()}))
    return without_blocks(problem).replaced(stages=stages)


DECIMALS = 6
"""Decimals of a time in the relaxation: so that times have a common grid."""


def _rounded_down(time: Fraction) -> int | float:
    value = Fraction(int(time * 10**DECIMALS), 10**DECIMALS)
    return int(value) if value.denominator == 1 else float(value)
