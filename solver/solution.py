"""Records passed between searches, the shared incumbent, children and callers: `Solution`, `Progress`, `Feed`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule, relative_gap


@dataclass(frozen=True)
class Solution:
    """Orders of a problem with the value that they reach, and a bound that holds for every schedule.

    Before any orders are known `orders` is None and `value_us` infinite. An infinite bound without orders is a proof
    that no schedule keeps the budgets. `method` found the orders and `proved_by` proved the bound; a single search
    leaves it to its caller to name it.
    """

    orders: Orders | None = None
    value_us: float = float("inf")
    bound_us: float = 0.0
    method: str = ""
    proved_by: str = ""

    @property
    def gap(self) -> float:
        """``(value - bound) / value``."""
        return relative_gap(self.value_us, self.bound_us)

    @property
    def infeasible(self) -> bool:
        """True if it is proved that no schedule keeps the budgets."""
        return self.orders is None and self.bound_us == float("inf")

    def to_schedule(self, problem: Problem, seconds: float) -> Schedule:
        """Time, wrap and verify the orders, as `solver.build.build_schedule` does; raises the same."""
        from solver.build import build_schedule  # slow to load, and most solutions are only passed on

        assert self.orders is not None, "there are no orders to make a schedule of"
        return build_schedule(problem, self.orders, self.bound_us, self.method, seconds)


INFEASIBLE = Solution(bound_us=float("inf"))
"""The answer of a search that proved that no schedule keeps the budgets."""

OnSolution = Callable[[Solution], None]


class Feed:
    """Solutions that other solves of the same problem find while this one runs. Safe to use from any thread.

    Only the newest one waits where nobody takes it: it is the best that the others have.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: Solution | None = None
        self._take: OnSolution | None = None

    def offer(self, solution: Solution) -> None:
        """Pass on orders with their value, and a bound that holds for every schedule."""
        with self._lock:
            take = self._take
            if take is None:
                self._waiting = solution
        if take is not None:
            take(solution)

    def pop(self) -> Solution | None:
        """The solution that waits, if any."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
        return waiting

    @contextmanager
    def into(self, take: OnSolution) -> Iterator[None]:
        """While in this context every solution goes to `take`; at once the one that waits."""
        with self._lock:
            self._take = take
        waiting = self.pop()
        if waiting is not None:
            take(waiting)
        try:
            yield
        finally:
            with self._lock:
                self._take = None


@dataclass(frozen=True)
class Progress:
    """A better solution, `seconds` after the start of the solve: a better value, or a higher bound alone."""

    solution: Solution
    seconds: float


OnProgress = Callable[[Progress], None]
