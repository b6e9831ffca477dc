"""Solves of a worker: what is asked of one, and the child process that does it, with one kept ready."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

from api.jobs.config import JobConfig
from optpipe.orders import Orders
from optpipe.problem import Problem
from solver.limits import Cancel, Limits
from solver.process import Child, ChildResult, Heartbeat, Incumbent, solve_in_child

OnEvent = Callable[[Incumbent | Heartbeat], None]


@dataclass(frozen=True)
class Task:
    """One solve: the problem, how, the memory it may hold, how to cancel it, and orders that it begins from."""

    problem: Problem
    config: JobConfig
    memory_limit_bytes: int | None
    cancel: Cancel
    starts: Sequence[Orders]

    def limits(self) -> Limits:
        """The limits of a solve that begins now."""
        config = self.config
        return Limits(config.time_limit_s, config.gap, config.workers, config.seed, self.cancel)


Solve = Callable[[Task, OnEvent], ChildResult]
"""What solves a task in the calling thread, raising as `solve_in_child` does."""


class ChildSolver:
    """Solves in child processes. One is kept ready: loading the solvers takes longer than many a solve.

    `prepare` must be called by a thread that lives as long as this object: on Linux the child dies with its maker.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._spare: Child | None = None

    def prepare(self) -> None:
        """Start a child for the next solve, unless one is there."""
        with self._lock:
            if self._spare is None:
                self._spare = Child()

    def close(self) -> None:
        """End the one that is kept ready."""
        spare = self._take()
        if spare is not None:
            with spare:
                pass

    def __call__(self, task: Task, on_event: OnEvent) -> ChildResult:
        """Solve in the child that was kept ready, or else in a new one."""
        spare = self._take()
        if spare is not None and not _runs(spare.pid):
            with spare:
                spare = None
        return solve_in_child(
            task.problem,
            task.config.method,
            task.limits(),
            task.memory_limit_bytes,
            on_event,
            child=spare,
            starts=task.starts,
        )

    def _take(self) -> Child | None:
        with self._lock:
            spare, self._spare = self._spare, None
        return spare


def _runs(pid: int) -> bool:
    """Whether a child has not ended; it stays to be waited for."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False
