"""How large a problem the mixed-integer program takes on; known without loading HiGHS."""

from __future__ import annotations

from optpipe.errors import MethodError
from optpipe.problem import Problem
from solver.size import count_ops

MOST_OPS = 3000
"""The largest model that is built: tables of all pairs of ops take 168 bytes a pair, 1.5 GB at this size."""


def refuse_too_large(problem: Problem) -> None:
    """Raise MethodError with the size and the limit where the model would be too large."""
    ops = count_ops(problem)
    if ops > MOST_OPS:
        raise MethodError(
            f"milp would build a model of {ops} ops, and its limit is {MOST_OPS}: it decides on every pair of them. "
            "Maybe use auto or cp-sat, or fewer microbatches."
        )
