"""Published schedules made in the parent while a child is late: the answer where it brings nothing.

On a busy machine a child may need most of a short limit to begin. These take a fraction of a second each (for 64 stages
and 1,024 microbatches: 0.04 s for 1F1B, 0.7 s for zb-auto, 0.3 s for ada-offload on one core), and are far better than
the floor. They are made only once a child is late, so that a usual solve does nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread

from optpipe.errors import MethodError
from optpipe.orders import Orders
from optpipe.problem import Problem


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
        for name, orders_of in quick_methods().items():
            if not self._stopped:
                self._try(name, orders_of)

    def _try(self, name: str, orders_of: Callable[[Problem], Orders]) -> None:
        from optpipe.simulate import simulate
        from solver.finish import within_budgets

        try:
            orders = orders_of(self._problem)
        except MethodError:
            return
        simulation = simulate(self._problem, orders)
        better = self.best is None or simulation.value_us < self.best.value_us
        if better and within_budgets(self._problem, orders, simulation):
            self.best = Published(orders, simulation.value_us, name)


def quick_methods() -> dict[str, Callable[[Problem], Orders]]:
    """The published schedules that are tried, by the names that `solver.methods` gives them.

    They are not taken from there, because that loads CP-SAT and HiGHS as well, which takes as long as the child does.
    """
    from solver.published.ada_offload import ada_offload
    from solver.published.interleaved import interleaved_1f1b
    from solver.published.one_f_one_b import one_f_one_b
    from solver.published.zb_auto import zb_auto

    return {
        "1f1b": one_f_one_b,
        "interleaved-1f1b": interleaved_1f1b,
        "zb-auto": zb_auto,
        "ada-offload": ada_offload,
    }
