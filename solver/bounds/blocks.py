"""Bounds on problems with blocks (`Problem.overlaps`).

First a relaxation: ops apart, each shorter by its share of what blocks save.

A block of F and BW that takes T saves ``F + BW - T``. Let each forward be shorter by its share of the most that a block
with it saves, and each backward likewise; then a block is at least as long as its two shortened ops one after the
other. Put there, they keep every rule, since F ends no later and BW begins no earlier, and hold no more memory. So any
schedule is one of the relaxation too, of at most the same value. With factors the shortened ops grow with their own
units and the block with the larger, so that this stays true.

Then the time before a device's first backward, in which it has no blocks (`block_bounds_us`), and how many blocks there
is memory for (`blocks_in_memory_bound_us`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from optpipe.ops import Floats
from optpipe.problem import Problem
from optpipe.stage import exact
from solver.bounds.linear_program import LinearProgram
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


def blocks_in_memory_bound_us(problem: Problem) -> float:
    """A bound by the numbers of blocks of each pair: they save compute, and lengthen the lives of activations.

    Between the start of a block of length T and what its forward sends lies T, not F; for its backward T, not B. An
    activation lives from its F to its B, through all stages behind it and back: each block on that path adds T - F or
    T - B to its life. Lives times bytes fit into the budget times the span, less what is free near both ends, where one
    activation comes or goes with each op. All compute, less what blocks save, fits into the span too, less the idle
    time before the first backward, for whose forwards there is no memory. Both are linear in the numbers of blocks.

    0 where microbatches differ, are sliced, or may be in other modes than kept.
    """
    if not problem.has_equal_microbatches or any(stage.choices[1:] for stage in problem.stages):
        return 0.0
    costs, m = UnitCosts.of(without_blocks(problem)), problem.microbatches
    arrays = costs.forward, costs.backward, costs.weight, costs.whole, costs.to_top, costs.from_top
    forward, backward, weight, whole, to_top, from_top = (of_units[:, 0] for of_units in arrays)
    heads_us, tails_us = costs.heads_us[:, 0], np.append(0.0, costs.tails_us[1:, 0])
    if problem.objective != "makespan":
        heads_us, tails_us = np.zeros_like(heads_us), np.zeros_like(tails_us)
    (f, b), block_us = np.array([*problem.block_us]).T, np.array([*problem.block_us.values()])
    saved_us = forward[f] + (backward + weight)[b] - block_us
    program = LinearProgram()
    columns = [program.column() for _ in block_us]

    def count(of_pairs: Floats) -> dict[int, float]:
        return {column: float(us) for column, us in zip(columns, of_pairs, strict=True) if us}

    for s in range(len(problem.stages)):
        program.at_most(count(1.0 * (f == s)), m)
        program.at_most(count(1.0 * (b == s)), m)
    for device, own in zip(problem.devices, map(list, problem.stages_of), strict=True):
        if not own:
            continue
        before_us = alone_us = to_top[own[0]] + from_top[own[-1]]
        if device.memory_bytes and whole[own].min() > 0:
            alone_us = min(before_us, device.memory_bytes / whole[own].min() * forward[own].max())
            share, room = whole[own] / device.memory_bytes, device.memory_bytes / whole[own].max()
            stay_us = (to_top + from_top + backward)[own]
            longer_us = (f[:, None] >= own) * (block_us - forward[f])[:, None]
            longer_us += (b[:, None] >= own) * (block_us - backward[b])[:, None]
            ends_us = max(room - 1, 0) ** 2 / (2 * room) * (forward[own].min() + backward[own].min())
            ends_us *= 2 * room <= m  # then neither end reaches into the other
            held_us = heads_us[own[0]] + m * share @ stay_us + ends_us + tails_us[own[0]]
            program.at_least({0: 1} | count(-longer_us @ share), held_us)
        work_us = m * (forward + backward + weight)[own].sum()
        program.at_least({0: 1} | count(saved_us * np.isin(f, own)), heads_us[own[0]] + before_us - alone_us + work_us)
    return program.least()


DECIMALS = 6
"""Decimals of a time in the relaxation: so that times have a common grid."""


def _rounded_down(time: Fraction) -> int | float:
    value = Fraction(int(time * 10**DECIMALS), 10**DECIMALS)
    return int(value) if value.denominator == 1 else float(value)
