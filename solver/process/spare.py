"""Published schedules made in the parent while a child is late: the answer where it brings nothing better.

A child may hang or die while it loads. What its search would begin with is then made here, in the same order
(`solver.starts`), and only once a child is late, so that a usual solve does nothing twice. Loading and making these
schedules is what a child does first, so on a busy machine it is given the time that it waited for a processor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Thread

from optpipe.orders import Orders
from optpipe.problem import Problem
from solver.limits import Cancel, Limits


@dataclass(frozen=True)
class Published:
    """Orders of the published schedule `method` within the budgets, and the value that they reach."""

    orders: Orders
    value_us: float
    method: str


class Spare:
    """The best published schedule of a problem, made in a thread; `best` and `bound_us` as it goes."""

    def __init__(self, problem: Problem, limits: Limits) -> None:
        self.best: Published | None = None
        self.bound_us = 0.0
        self._problem = problem
        self._limits = replace(limits, cancel=Cancel())
        self._thread: Thread | None = None

    def begin(self) -> None:
        """Begin, unless that was done before."""
        if self._thread is None:
            self._thread = Thread(target=self.make, name="spare", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Begin no further one: nobody waits for it."""
        self._limits.cancel.request()

    def make(self) -> None:
        """Make the bound, and then the schedules, one after another."""
        from solver.board import Board, Progress
        from solver.starts import offer_published

        def keep(progress: Progress) -> None:
            if progress.orders is not None:
                self.best = Published(progress.orders, progress.value_us, progress.method)

        board = Board(self._problem, self._limits, keep)
        self.bound_us = board.best.bound_us
        with self._limits.cancel.calling(board.stop.request):
            offer_published(self._problem, board)
