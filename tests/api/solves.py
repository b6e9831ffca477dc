"""Solves for tests: published schedules one after another, as fast or as slowly as a test wants."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from api.jobs.run import OnEvent, SolveRequest
from instances import uniform
from optpipe.errors import InfeasibleError, MethodError, NoSolutionError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.process import ChildResult, Heartbeat
from solver.serial import impossible_budgets, known_budgets_bytes
from solver.solution import Progress, Solution
from solver.solve import solve

PROBLEM = uniform(2, 4, budget=8, name="two devices")
STEPS = ("1f1b", "zb-h1", "zb-h2")
STEP_VALUES_US = (154, 134, 131)
"""What they reach on PROBLEM; the last is optimal."""


def body(problem: Problem = PROBLEM, **config: Any) -> dict[str, Any]:
    """What is posted to have a problem solved."""
    return {"problem": problem.to_data(), "config": config}


class Stepwise:
    """Solves with one published schedule after another; `may_go_on` is asked, again and again, before each but the
    first. Ends early when it is cancelled."""

    def __init__(self, may_go_on: Callable[[], bool]) -> None:
        self.may_go_on = may_go_on

    def __call__(self, task: SolveRequest, on_event: OnEvent) -> ChildResult:
        best: Schedule | None = None
        for method in STEPS:
            while best is not None and not self.may_go_on():
                if task.cancel.requested:
                    return ChildResult(best, "feasible", "interrupted")
                on_event(Heartbeat(0.0, None))
                time.sleep(0.02)
            best = _better(task.problem, method, best, on_event)
        if best is None and impossible_budgets(task.problem):
            error = InfeasibleError("one microbatch alone needs more.", known_budgets_bytes(task.problem))
            return ChildResult(None, "infeasible", None, error)
        if best is None:
            return ChildResult(None, "no_solution", "time", NoSolutionError("nothing published keeps the budgets."))
        return ChildResult(best, best.status, None)


def _better(problem: Problem, method: str, best: Schedule | None, on_event: OnEvent) -> Schedule | None:
    try:
        found = solve(problem, method)
    except MethodError:
        return best
    if best is not None and found.value_us >= best.value_us:
        return best
    on_event(Progress(Solution(found.orders, found.value_us, found.bound_us, method), 0.1))
    return found


at_once = Stepwise(lambda: True)
"""Solves within milliseconds."""
