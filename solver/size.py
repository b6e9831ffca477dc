"""How large a problem is: what decides which searches are worth their time, and which models can be built."""

from __future__ import annotations

from optpipe.problem import Problem


def count_ops(problem: Problem) -> int:
    """F, B and W of all stages and microbatches, and O and R where a stage may offload."""
    return problem.microbatches * sum(5 if stage.offload else 3 for stage in problem.stages)
