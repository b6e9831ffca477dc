"""What is known of a problem while several searches run at once: the best schedule, the best bound, whether to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from optpipe.gap import gap_of
from optpipe.orders import Orders
from optpipe.problem import Problem
from solver.bounds import lower_bound_us
from solver.finish import snapped_bound
from solver.horizon import horizon_us
from solver.limits import Answer, Cancel, Limits, Start
from solver.time_unit import value_step_us


@dataclass(frozen=True)
class Progress:
    """A better schedule or bound, `seconds` after the start: `orders` reach `value_us`, and `method` found them."""

    seconds: float
    value_us: float
    bound_us: float
    method: str
    orders: Orders | None

    @property
    def gap(self) -> float:
        """``(value - bound) / value``."""
        return gap_of(self.value_us, self.bound_us)


OnProgress = Callable[[Progress], None]


class Board:
    """Collects what searches find and tells them when to stop. Safe to use from any thread.

    `stop` is requested as soon as the gap asked for is reached, the problem is proved infeasible, or the caller
    cancels; searches are given it in place of the caller's own.
    """

    def __init__(self, problem: Problem, limits: Limits, on_progress: OnProgress | None) -> None:
        self.problem = problem
        self.limits = limits
        self.stop = Cancel()
        self.infeasible = False
        self.method = ""
        self._on_progress = on_progress
        self._step_us = value_step_us(problem)
        self._lock = Lock()
        self._closed = False
        self._best = Answer(None, float("inf"), lower_bound_us(problem))

    @property
    def best(self) -> Answer:
        """The best schedule and the best bound, from whichever search."""
        return self._best

    def start(self) -> Start:
        """What a search that begins now should know."""
        best = self._best
        return Start(best.bound_us, horizon_us(self.problem, best.value_us), best.orders, best.value_us)

    def offer(self, answer: Answer, method: str) -> None:
        """Keep what is better than all before, and tell the caller of the solve."""
        with self._lock:
            better = not self._closed and self._keep(answer, method)
            best = self._best
            if better and best.orders is not None and self._on_progress:
                progress = Progress(self.limits.seconds, best.value_us, best.bound_us, method, best.orders)
                self._on_progress(progress)
        if self.infeasible or self.limits.reached(best.value_us, best.bound_us):
            self.stop.request()

    def close(self) -> None:
        """Stop all searches; nothing that they still find is taken."""
        self.stop.request()
        with self._lock:
            self._closed = True

    def _keep(self, answer: Answer, method: str) -> bool:
        best = self._best
        if answer.infeasible:
            self.infeasible = True
            return False
        improves = answer.orders is not None and answer.value_us < best.value_us
        orders, value = (answer.orders, answer.value_us) if improves else (best.orders, best.value_us)
        bound = max(best.bound_us, answer.bound_us)
        if orders is not None:
            bound = snapped_bound(value, bound, self._step_us)
        if improves:
            self.method = method
        if improves or bound > best.bound_us:
            self._best = Answer(orders, value, bound)
        return self._best is not best
