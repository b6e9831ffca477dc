"""Bounds on problems with blocks (`Problem.overlaps`).

First a relaxation: ops apart, each shorter by its share of what blocks save.

A block of F and BW that takes T saves ``F + BW - T``. Let each forward be shorter by its share of the most that a block
with it saves, and each backward likewise; then a block is at least as long as its two shortened ops one after the
other. Put there, they keep every rule, since F ends no later and BW begins no earlier, and hold no more memory. So any
schedule is one of the relaxation too, of at most the same value. With factors the shortened ops grow with their own
units and the block with the larger, so that this stays true.

Then the time before a device's first backward, in which it has no blocks (`block_bounds_us`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from optpipe.problem import Problem
from optpipe.stage import exact
from solver.bounds.unit_costs import UnitCosts


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


def block_bounds_us(problem: Problem) -> Sequence[float]:
    """A bound from each device that has stages: what it runs before its first backward runs alone.

    Let w be the time from its first forward to its first backward: at least w_0, that of a microbatch with the pipeline
    to itself from the device's first stage to the backward of its last. Forwards take a time a <= w of it, and hold
    their activations. A block saves at most a share r < 1 of its forward, whatever the factors of its units are, since
    it is no shorter than its backward. So from the first forward to the end there are at least w, all backwards, and
    1 - r of the forwards that are left. That grows with w and falls with a, which is at most w and what the budget
    has room for.
    """
    costs = UnitCosts.of(without_blocks(problem))
    saved = np.zeros(len(problem.stages))
    for (f, b), time_us in problem.block_us.items():
        forward_us, backward_us = problem.stages[f].duration_us("F"), problem.stages[b].duration_us("BW")
        saved[f] = max(saved[f], (forward_us + backward_us - time_us) / forward_us if forward_us else 0.0)
    heads_us = costs.heads_us.min(axis=1) if problem.objective == "makespan" else np.zeros(len(problem.stages))
    backward_us, forward_us = (costs.backward + costs.weight).sum(axis=1), costs.forward.sum(axis=1)
    bounds = []
    for device, own in zip(problem.devices, map(list, problem.stages_of), strict=True):
        if not own:
            continue
        before_us = alone_us = float((costs.to_top[own[0]] + costs.from_top[own[-1]]).min())
        kept_bytes = costs.whole[own].min()
        if device.memory_bytes is not None and kept_bytes > 0 and not any(problem.stages[s].choices[1:] for s in own):
            alone_us = min(alone_us, device.memory_bytes / kept_bytes * costs.forward[own].max())
        left_us = (1 - saved[own]) @ forward_us[own] - alone_us * (1 - saved[own]).max()
        bounds.append(float(heads_us[own[0]] + before_us + backward_us[own].sum() + max(left_us, 0.0)))
    return bounds


DECIMALS = 6
"""Decimals of a time in the relaxation: so that times have a common grid."""


def _rounded_down(time: Fraction) -> int | float:
    value = Fraction(int(time * 10**DECIMALS), 10**DECIMALS)
    return int(value) if value.denominator == 1 else float(value)
