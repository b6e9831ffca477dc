"""State of a running exact search: the best schedule, the best bound, and how far its models reach."""

from __future__ import annotations

from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import snapped_bound, within_budgets
from solver.limits import Limits
from solver.scale import horizon_us, value_step_us
from solver.solution import OnSolution, Solution


class Incumbent:
    """The best of one search of `problem`: `orders` reach `value_us`, and nothing is below `bound_us`.

    `horizon_us` is a time by which some schedule at least as good has ended. `has_optimum` says whether the models of
    the search have an optimum of all schedules, so that what they prove counts: without fused backwards some do not.
    """

    def __init__(
        self,
        problem: Problem,
        limits: Limits,
        start: Solution,
        on_solution: OnSolution,
        *,
        has_optimum: bool,
    ) -> None:
        self.problem, self.limits, self.on_solution = problem, limits, on_solution
        self.orders, self.value_us, self.bound_us = start.orders, start.value_us, start.bound_us
        self.horizon_us = horizon_us(problem, start.value_us)
        self.has_optimum = has_optimum
        self.step_us = value_step_us(problem)

    @property
    def answer(self) -> Solution:
        """The best schedule and bound so far."""
        return Solution(self.orders, self.value_us, self.bound_us)

    def offer(self, orders: Orders, bound_us: float) -> None:
        """Take a proved bound, and orders if they are better than all before and keep the budgets.

        A model in floats may take a budget for kept that is broken by a byte.
        """
        simulation = simulate(self.problem, orders)
        value_us = simulation.value_us
        better = value_us < self.value_us and within_budgets(self.problem, orders, simulation)
        if better:
            self.orders, self.value_us = orders, value_us
            self.horizon_us = min(self.horizon_us, horizon_us(self.problem, value_us))
        self.raise_bound(bound_us)
        if better:
            self.on_solution(self.answer)

    def raise_bound(self, bound_us: float) -> None:
        """Take a bound that the models prove, if it says something about all schedules.

        A bound above the value contradicts the schedule, and is kept, so that `solver.build` refuses to answer with
        the two.
        """
        if self.has_optimum:
            if self.orders is not None:
                bound_us = snapped_bound(self.value_us, bound_us, self.step_us)
            self.bound_us = max(self.bound_us, bound_us)
