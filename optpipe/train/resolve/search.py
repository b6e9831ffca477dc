"""Background search of rank 0, and the solver protocol. Training imports no solver: the caller passes one in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from optpipe.errors import OptPipeError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.train.config import OnlineConfig


class Search:
    """One search at a time by a solver, and its result until it is taken."""

    def __init__(self, solver: Solver, config: OnlineConfig) -> None:
        self._solver, self._config = solver, config
        self._solve: Solve | None = None
        self.why_nothing = ""

    def begin(self, problem: Problem, start: Schedule) -> None:
        """Start a search for a schedule better than `start`. Returns at once."""
        assert self._solve is None, "one search at a time"
        self._solve = self._solver.begin(problem, start, self._config.time_limit_s, self._config.workers)

    @property
    def running(self) -> bool:
        """True from `begin` until the result is taken."""
        return self._solve is not None

    @property
    def over(self) -> bool:
        """True if there is a result to take."""
        return self._solve is not None and self._solve.poll()

    def take(self) -> Schedule | None:
        """Take the result; None if there is none, for the reason in `why_nothing`: a failed search ends no training."""
        assert self._solve is not None, "a search was begun"
        solve, self._solve = self._solve, None
        try:
            schedule = solve.result()
        except OptPipeError as error:
            self.why_nothing = f"the search failed: {error}"
            return None
        self.why_nothing = "" if schedule else "the search found nothing."
        return schedule

    def cancel(self) -> None:
        """End the search, if one is running."""
        if self._solve is not None:
            self._solve.cancel()
            self._solve = None


class Solve(Protocol):
    """Search that runs during the training, in a process of its own."""

    def poll(self) -> bool:
        """Return True if the search is over. Returns at once."""
        ...

    def result(self) -> Schedule | None:
        """Wait for the end; return the verified schedule, None if nothing was found. Raises OptPipeError."""
        ...

    def cancel(self) -> None:
        """End it, and wait until its process is gone."""
        ...


class Solver(Protocol):
    """A search for schedules of a problem."""

    def quick(self, problem: Problem) -> Schedule:
        """Heuristic schedule within the budgets, in milliseconds (`ada-offload`). Raises MethodError without one."""
        ...

    def least_budgets_bytes(self, problem: Problem) -> Sequence[int]:
        """Budget of each device with which `quick` finds a schedule."""
        ...

    def begin(self, problem: Problem, start: Schedule | None, time_limit_s: float, workers: int) -> Solve:
        """Start a search for a schedule better than `start` in a process of its own. Returns at once."""
        ...
