"""1F1B: as many forwards in flight as stages follow, then one forward, one backward (PipeDream, arXiv 1806.03377)."""

from __future__ import annotations

from optpipe.orders import OpArray, Orders
from optpipe.problem import Problem
from solver.published.placement import require_one_stage_a_device
from solver.published.turns import in_turn


def one_f_one_b(problem: Problem) -> Orders:
    """1F1B with B and W fused: stage s of p begins with p - s forwards. Raises MethodError on placement."""
    require_one_stage_a_device(problem, "1f1b")
    return Orders.of_compute(_stage_order(problem, stage) for (stage,) in problem.stages_of)


def _stage_order(problem: Problem, stage: int) -> OpArray:
    warm_up = len(problem.stages) - stage
    return in_turn(stage, problem.microbatches, [("BW", 0), ("F", -warm_up)])
