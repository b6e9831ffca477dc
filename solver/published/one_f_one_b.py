"""1F1B: as many forwards in flight as stages follow, then one forward, one backward (PipeDream, arXiv 1806.03377)."""

from __future__ import annotations

from optpipe.orders import Op, Orders
from optpipe.problem import Problem
from solver.published.placement import require_one_stage_a_device


def one_f_one_b(problem: Problem) -> Orders:
    """1F1B with B and W fused: stage s of p begins with p - s forwards. Raises MethodError on placement."""
    require_one_stage_a_device(problem, "1f1b")
    return Orders.of_compute(_stage_order(problem, stage) for (stage,) in problem.stages_of)


def _stage_order(problem: Problem, stage: int) -> list[Op]:
    microbatches = problem.microbatches
    warm_up = min(len(problem.stages) - stage, microbatches)
    order = [Op("F", stage, i) for i in range(warm_up)]
    for i in range(microbatches):
        order.append(Op("BW", stage, i))
        if warm_up + i < microbatches:
            order.append(Op("F", stage, warm_up + i))
    return order
