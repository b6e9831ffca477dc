"""1F1B: as many forwards in flight as stages follow, then one forward, one backward (PipeDream, arXiv 1806.03377)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optpipe.orders import Op, Orders
from optpipe.problem import Problem
from solver.published.placement import require_one_stage_a_device


def one_f_one_b(problem: Problem) -> Orders:
    """1F1B with B and W fused: stage s of p begins with p - s forwards. Raises MethodError on placement."""
    require_one_stage_a_device(problem, "1f1b")
    return Orders.of_compute(_stage_order(problem, stage) for (stage,) in problem.stages_of)


def _stage_order(problem: Problem, stage: int) -> list[Op]:
    return alternating(problem, stage, lambda i: [Op("BW", stage, i)])


def alternating(problem: Problem, stage: int, backward: Callable[[int], Sequence[Op]]) -> list[Op]:
    """The order of 1F1B on a stage, with the ops that `backward` gives in place of microbatch i's backward."""
    microbatches = problem.microbatches
    warm_up = min(len(problem.stages) - stage, microbatches)
    order = [Op("F", stage, i) for i in range(warm_up)]
    for i in range(microbatches):
        order += backward(i)
        if warm_up + i < microbatches:
            order.append(Op("F", stage, warm_up + i))
    return order
