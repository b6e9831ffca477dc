"""`auto`: which searches run on a problem, side by side or one after another.

A small problem goes to proof: after a moment of local search CP-SAT has all cores. A large one goes to search:
annealing on one core, patterns, windows and bounds in turns on another; with a single core all of them in turns. The
larger the problem, the more of the time is the patterns', which alone do not slow down with the microbatches; the
largest have nothing else but annealing.
"""

from __future__ import annotations

from collections.abc import Sequence

from optpipe.problem import Problem
from solver import searches
from solver.lanes import Lane, Turn
from solver.size import count_ops

SMALL_OPS = 600
"""Ops, transfers included, up to which CP-SAT is likely to prove an optimum within a minute."""

LARGE_OPS = 20_000
"""Ops from which annealing and windows reach little of a schedule within a minute."""

MOST_MODEL_OPS = 50_000
"""Ops up to which CP-SAT has a part in it: of more, windows and parts take many seconds to model and heed no limit."""


def auto_lanes(problem: Problem, workers: int) -> Sequence[Lane]:
    """The lanes for a problem of this size on so many cores. Shares of one lane sum up to at most 1."""
    ops = count_ops(problem)
    if ops <= SMALL_OPS:
        return [
            [
                Turn("search", searches.local, 0.05, workers),
                Turn("cp-sat", searches.cp_sat, 0.6, workers),
                Turn("windows", searches.windows, 0.15, workers),
                Turn("search", searches.local, 0.15, workers),
            ]
        ]
    pattern = Turn("pattern", searches.pattern, 0.25 if ops <= LARGE_OPS else 0.5, once=True)
    if workers == 1:
        return [[pattern, Turn("search", searches.local, 0.2), *_models(ops, 0.2, 1)]]
    beside = _models(ops, 0.35, workers - 1) or [Turn("search", searches.local, 0.35, workers - 1)]
    return [[Turn("search", searches.local, 0.35)], [pattern, *beside]]


def _models(ops: int, share: float, workers: int) -> Lane:
    """Windows and bounds, where CP-SAT's models of them are built in time."""
    if ops > MOST_MODEL_OPS:
        return []
    return [Turn("windows", searches.windows, share, workers), Turn("bound", searches.bounds, 0.1, once=True)]
