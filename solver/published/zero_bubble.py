"""The handcrafted schedule ZB-H1 (Zero Bubble, section 2)."""

from __future__ import annotations

from optpipe.orders import Op, Orders
from optpipe.problem import Problem
from solver.published.one_f_one_b import alternating
from solver.published.placement import require_one_stage_a_device


def zb_h1(problem: Problem) -> Orders:
    """ZB-H1: 1F1B's warm-up, and W delayed by as many microbatches as stages precede, at the memory of 1F1B.

    Every stage then has p microbatches in flight: p - s before their B and s before their W.
    Raises MethodError on placement.
    """
    require_one_stage_a_device(problem, "zb-h1")
    return Orders.of_compute(_stage_order(problem, stage) for (stage,) in problem.stages_of)


def _stage_order(problem: Problem, stage: int) -> list[Op]:
    def backward(i: int) -> list[Op]:
        late = [Op("W", stage, i - stage)] if i >= stage else []
        return [Op("B", stage, i), *late]

    left = range(max(problem.microbatches - stage, 0), problem.microbatches)
    return alternating(problem, stage, backward) + [Op("W", stage, i) for i in left]
