"""Published schedules made in the parent while a child is late: the answer where it brings nothing.

On a busy machine a child may need most of a short limit to begin. These take a fraction of a second each (for 64 stages
and 1,024 microbatches: 0.04 s for 1F1B, 0.7 s for zb-auto, 0.3 s for ada-offload on one core), and are far better than
the floor. They are made only once a child is late, so that a usual solve does nothing twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Thread

from optpipe.errors import MethodError
from optpipe.orders import Orders
from optpipe.problem import Problem

QUICK_METHODS = ("1f1b", "interleaved-1f1b", "zb-auto", "ada-offload")
"""The published schedules that are tried, in this order."""


@dataclass(frozen=True)
class Published:
    """Orders of the published schedule `method` within the budgets, and the value that they reach."""

    orders: Orders
    value_us: float
    method: str


class Spare:
    """The best of a few quick published schedules of a problem, made in a thread; `best` and `bound_us` as it goes."""

    def __init__(self, problem: Problem) -> None:
        self.best: Published | None = None
        self.bound_us = 0.0
        self._problem = problem
        self._thread: Thread | None = None
        self._stopped = False

    def begin(self) -> None:
        """Begin, unless that was done before."""
        if self._thread is None:
            self._thread = Thread(target=self.make, name="spare", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Begin no further one: nobody waits for it."""
        self._stopped = True

    def make(self) -> None:
        """Make the bound, and then the schedules, one after another."""
        from solver.bounds import lower_bound_us

        self.bound_us = lower_bound_us(self._problem)
        for name in QUICK_METHODS:
            if not self._stopped:
                self._try(name)

    def _try(self, name: str) -> None:
        from optpipe.simulate import simulate
        from solver.finish import within_budgets
        from solver.methods import METHODS

        orders_of = METHODS[name].orders
        assert orders_of is not None, "published schedules are made of nothing but the problem"
        try:
            orders = orders_of(self._problem)
        except MethodError:
            return
        simulation = simulate(self._problem, orders)
        better = self.best is None or simulation.value_us < self.best.value_us
        if better and within_budgets(self._problem, orders, simulation):
            self.best = Published(orders, simulation.value_us, name)
