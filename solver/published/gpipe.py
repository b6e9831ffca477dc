"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""

from __future__ import annotations

from optpipe.orders import Op, Orders
from optpipe.problem import Problem
from solver.published.placement import require_one_stage_a_device


def gpipe(problem: Problem) -> Orders:
    """All forwards of all microbatches, then all backwards with B and W fused. Raises MethodError on placement."""
    require_one_stage_a_device(problem, "gpipe")
    microbatches = range(problem.microbatches)
    return Orders.of_compute(
        [Op(kind, stage, i) for kind in ("F", "BW") for i in microbatches] for (stage,) in problem.stages_of
    )
