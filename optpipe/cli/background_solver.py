"""Searches in child processes, while a training runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Thread

from optpipe.errors import OptPipeError
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.limits import Limits
from solver.process import ChildResult, solve_in_child
from solver.serial import known_budgets_bytes
from solver.solve import solve


class ChildSolver:
    """Solver of `optpipe.train.resolve.search` that runs `auto` in child processes."""

    def quick(self, problem: Problem) -> Schedule:
        """Solve by `ada-offload` in this process: milliseconds."""
        return solve(problem, "ada-offload")

    def least_budgets_bytes(self, problem: Problem) -> Sequence[int]:
        """Return the least known budgets: those of one microbatch at a time, which `ada-offload` tries too."""
        return known_budgets_bytes(problem)

    def begin(self, problem: Problem, start: Schedule | None, time_limit_s: float, workers: int) -> ChildSolve:
        """Start a search by `auto` from the schedule in use."""
        return ChildSolve(problem, Limits(time_limit_s, 0.0, workers), [start.orders_in(problem)] if start else [])


@dataclass
class ChildSolve:
    """Search in a child process, started at construction and watched by a daemon thread."""

    problem: Problem
    limits: Limits
    starts: list[Orders]
    _result: ChildResult | None = None
    _error: OptPipeError | None = None
    _thread: Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = Thread(target=self._run, name="solve", daemon=True)
        self._thread.start()

    def poll(self) -> bool:
        """Return whether the search has ended."""
        return not self._thread.is_alive()

    def result(self) -> Schedule | None:
        """Wait for the schedule; None if none was found. Raises the error that ended the search."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result.schedule if self._result else None

    def cancel(self) -> None:
        """End the search within a second."""
        self.limits.cancel.request()
        self._thread.join()

    def _run(self) -> None:
        # The kernel ends the child with the thread that started it (PR_SET_PDEATHSIG), so this thread waits for it.
        try:
            self._result = solve_in_child(self.problem, "auto", self.limits, starts=self.starts)
        except OptPipeError as error:
            self._error = error
