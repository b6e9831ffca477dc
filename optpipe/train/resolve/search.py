"""Rank 0's searches, one at a time."""

from __future__ import annotations

from optpipe.errors import OptPipeError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.train.config import OnlineConfig
from optpipe.train.online.solver import Solve, Solver


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
