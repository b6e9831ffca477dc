"""What training asks of a solver. Training imports none: whoever starts it brings one along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from optpipe.problem import Problem
from optpipe.schedule import Schedule


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
