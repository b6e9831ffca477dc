"""The solver that training brings along: searches in child processes, watched by a thread, beside the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Thread

from optpipe.errors import OptPipeError
from optpipe.orders import Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.floor import known_budgets_bytes
from solver.limits import Limits
from solver.portfolio import solve
from solver.process import ChildResult, solve_in_child


class ChildSolver:
    """`optpipe.train.online.solver.Solver` by the portfolio."""

    def quick(self, problem: Problem) -> Schedule:
        """By `ada-offload`, in this process."""
        return solve(problem, "ada-offload")

    def least_budgets_bytes(self, problem: Problem) -> Sequence[int]:
        """Those of the floor, which `ada-offload` tries too."""
        return known_budgets_bytes(problem)

    def begin(self, problem: Problem, start: Schedule | None, time_limit_s: float, workers: int) -> ChildSolve:
        """By `auto`, which begins where the schedule in use is."""
        return ChildSolve(problem, Limits(time_limit_s, 0.0, workers), [start.orders] if start else [])


@dataclass
class ChildSolve:
    """One search, from its begin."""

    problem: Problem
    limits: Limits
    starts: list[Orders]
    _found: ChildResult | None = None
    _error: OptPipeError | None = None
    _thread: Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = Thread(target=self._run, name="solve", daemon=True)
        self._thread.start()

    def poll(self) -> bool:
        """Whether it is over."""
        return not self._thread.is_alive()

    def result(self) -> Schedule | None:
        """The schedule, None where there is none. Waits. Raises what ended the search otherwise."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found.schedule if self._found else None

    def cancel(self) -> None:
        """End the search within a second."""
        self.limits.cancel.request()
        self._thread.join()

    def _run(self) -> None:
        """In the thread that makes the child, which must outlive it."""
        try:
            self._found = solve_in_child(self.problem, "auto", self.limits, starts=self.starts)
        except OptPipeError as error:
            self._error = error
