"""Solve through the cache: answer from it, else solve from what it knows nearby, then keep the result.

The service keeps solutions in its database and follows the same rules: `solver.cache.solved_well_enough` when a job is
submitted, `cpu_seconds_given` when a worker stores a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optpipe.ops import Orders
from optpipe.problem import Problem
from solver.cache import Cache
from solver.limits import Limits
from solver.process.channel import Limit
from solver.process.parent import ChildResult

NEIGHBOURS_SHARE = 0.1
"""Share of the time limit in which schedules for other numbers of microbatches are made into starts."""


def solve_cached(
    problem: Problem,
    method: str,
    limits: Limits,
    solve: Callable[[Sequence[Orders]], ChildResult],
    cache: Cache | None = None,
) -> ChildResult:
    """The cached schedule of an equal problem, if it was solved well enough; else what `solve` finds, kept for later.

    `solve` gets orders made of schedules for other budgets or microbatches. The result says `from_cache`.
    """
    cache = cache or Cache()
    known = cache.lookup(problem)
    if known is not None and known.answers(method, limits):
        return ChildResult(known.schedule, known.schedule.status, None, from_cache=True)
    result = solve(cache.neighbours(problem, NEIGHBOURS_SHARE * limits.time_limit_s))
    if result.schedule is not None:
        spent = cpu_seconds_given(limits.time_limit_s, limits.workers, result.limit, result.schedule.solve_seconds)
        cache.store(result.schedule, method, spent)
    return result


def cpu_seconds_given(time_limit_s: float, workers: int, limit: Limit | None, seconds: float) -> float:
    """Time times threads for which a result counts as searched: the whole limit, unless something else ended it.

    A search that ended by itself would find no more in the rest of its limit.
    """
    return workers * (time_limit_s if limit in (None, "time") else seconds)
