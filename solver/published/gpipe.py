"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""

from __future__ import annotations

from optpipe.orders import Orders
from optpipe.problem import Problem
from solver.published.placement import require_one_stage_a_device
from solver.published.turns import in_turn


def gpipe(problem: Problem) -> Orders:
    """All forwards of all microbatches, then all backwards with B and W fused. Raises MethodError on placement."""
    require_one_stage_a_device(problem, "gpipe")
    microbatches = problem.microbatches
    return Orders.of_compute(
        in_turn(stage, microbatches, [("F", 0), ("BW", microbatches)]) for (stage,) in problem.stages_of
    )
