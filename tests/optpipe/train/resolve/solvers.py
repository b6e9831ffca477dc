"""Solvers for tests: what they answer is decided beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from optpipe.errors import NoSolutionError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.serial import known_budgets_bytes
from solver.solve import solve


@dataclass
class Answer:
    """A search that is over when it has been asked so often."""

    schedule: Schedule | None
    polls: int = 2
    fails: bool = False
    cancelled: bool = False

    def poll(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def result(self) -> Schedule | None:
        if self.fails:
            raise NoSolutionError("nothing was found. Maybe allow more time.")
        return self.schedule

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Scripted:
    """Each search ends with the next of these published schedules; None: with nothing; "fails": with an error."""

    answers: list[str | None]
    first: str = "ada-offload"
    problems: list[Problem] = field(default_factory=list)
    searches: list[Answer] = field(default_factory=list)

    def quick(self, problem: Problem) -> Schedule:
        return solve(problem, self.first)

    def least_budgets_bytes(self, problem: Problem) -> Sequence[int]:
        return known_budgets_bytes(problem)

    def begin(self, problem: Problem, start: Schedule | None, time_limit_s: float, workers: int) -> Answer:
        self.problems.append(problem)
        method = self.answers.pop(0)
        found = solve(problem, method) if method not in (None, "fails") else None
        self.searches.append(Answer(found, fails=method == "fails"))
        return self.searches[-1]
