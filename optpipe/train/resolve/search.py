"""Background search of rank 0, and the solver protocol. Training imports no solver: the caller brings one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from optpipe.errors import OptPipeError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.train.config import OnlineConfig


class Search:
    """Asks a solver, and holds its answer until somebody takes it."""

    def __init__(self, solver: Solver, config: OnlineConfig) -> None:
        self._solver, self._config = solver, config
        self._solve: Solve | None = None
        self.why_nothing = ""

    def begin(self, problem: Problem, start: Schedule) -> None:
        """Search for something better than `start` for a problem. Returns at once."""
        assert self._solve is None, "one search at a time"
        self._solve = self._solver.begin(problem, start, self._config.time_limit_s, self._config.workers)

    @property
    def running(self) -> bool:
        """Whether a search was begun whose answer nobody took."""
        return self._solve is not None

    @property
    def over(self) -> bool:
        """Whether there is an answer to take."""
        return self._solve is not None and self._solve.poll()

    def take(self) -> Schedule | None:
        """The answer; None where there is none, for the reason in `why_nothing`. Training goes on in any case."""
        assert self._solve is not None, "a search was begun"
        solve, self._solve = self._solve, None
        try:
            found = solve.result()
        except OptPipeError as error:
            self.why_nothing = f"the search failed: {error}"
            return None
        self.why_nothing = "" if found else "the search found nothing."
        return found

    def cancel(self) -> None:
        """End what is under way."""
        if self._solve is not None:
            self._solve.cancel()
            self._solve = None


class Solve(Protocol):
    """A search that runs beside the training, in a process of its own."""

    def poll(self) -> bool:
        """Whether it is over. Returns at once."""
        ...

    def result(self) -> Schedule | None:
        """What it found, verified; None where nothing was. Waits until it is over. Raises OptPipeError."""
        ...

    def cancel(self) -> None:
        """End it, and wait until its process is gone."""
        ...


class Solver(Protocol):
    """Finds schedules of a problem."""

    def quick(self, problem: Problem) -> Schedule:
        """A schedule within the budgets in milliseconds (`ada-offload`). Raises MethodError where there is none."""
        ...

    def least_budgets_bytes(self, problem: Problem) -> Sequence[int]:
        """For each device a budget with which `quick` finds something."""
        ...

    def begin(self, problem: Problem, start: Schedule | None, time_limit_s: float, workers: int) -> Solve:
        """Search for a better one than `start`, beside whatever this process does. Returns at once."""
        ...
