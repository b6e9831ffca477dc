"""Large-neighbourhood search (Shaw 1998): CP-SAT solves windows of a schedule anew; all around them keeps its order.

Ops before a window stay where they are; ops after it keep their order and follow as early as they can. So a window's
model is as large as the window, however large the problem, and what it gains reaches the end of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from ortools.sat.python import cp_model

from optpipe.errors import DeadlockError
from optpipe.ops import Orders
from optpipe.problem import Problem
from solver.exact.cp_sat.model import configured_solver, solve_unless_cancelled
from solver.exact.ticks import TimeGrid
from solver.limits import Limits
from solver.microbatch_orders import in_order, with_numbers_in_order, with_own_numbers
from solver.scale import horizon_us, without_endless_copies
from solver.search.lns.model import WindowModel
from solver.search.lns.neighbourhood import Numbering, Surroundings, Window, choose_window, with_split_backwards
from solver.solution import OnSolution, Solution

SMALLEST, LARGEST = 16, 2000
"""Smallest and largest number of ops that a window decides."""

FIRST = 60
"""Number of ops that the first window decides."""

WORK, SECONDS = 1.5, 3.0
"""Limits for one window: CP-SAT's deterministic time, and seconds where the clock counts."""

NEAR = 0.005
"""Largest gap, as a share of the value, at which windows at the end are asked for the bound itself."""

LAST, MOST_LAST = 500, 4000
"""Number of ops of the first of these windows, and of the largest."""

GROWTH, FINE_GROWTH = 1.3, 1.1
"""Factors by which these windows grow: while the answer is no at once, and from the last such window on."""

ASKED_WORK, MORE_WORK = 0.3, 1.5
"""CP-SAT's deterministic time for the first of them without an answer, and how many times that each next one has."""

LAST_SHARE = 0.5
"""Largest share of the time or work left that they may take together."""


def lns_search(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Improve the best schedule known, window by window, until the limits are reached; report every better answer.

    Returns the start's orders where nothing better was found, and the start's bound: windows prove nothing.
    """
    return start if start.orders is None else _Search(problem, limits, start, on_solution).run()


class _Search:
    """The state of the search: the current schedule, the size of windows, and the work left."""

    def __init__(self, problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> None:
        assert start.orders is not None
        self.problem, self.limits, self.on_solution = problem, limits, on_solution
        self.best = start
        problem, orders = without_endless_copies(problem, horizon_us(problem, start.value_us)), start.orders
        self.microbatch_order: Sequence[int] | None = None
        """The start's order where it is free: windows keep it, and number the microbatches by it."""
        if problem.microbatch_order == "free":
            self.microbatch_order = list(orders.microbatch_order or range(problem.microbatches))
            orders = with_numbers_in_order(problem, orders)
            problem = in_order(problem, self.microbatch_order)
        numbering = Numbering(problem, TimeGrid.of(problem, start.value_us))
        self.current = Surroundings.of(numbering, with_split_backwards(problem, orders))
        self.random = np.random.default_rng(limits.seed)
        self.size = float(FIRST)
        self.work_left = limits.deterministic_limit

    def run(self) -> Solution:
        """Windows until the limits are reached."""
        if self.current.value_us > self.best.value_us or not self.current.keeps_budgets:
            return self.best  # fused backwards are needed
        self._ask_for_bound()
        while not self._done:
            self._step()
        return self.best

    def _ask_for_bound(self) -> None:
        """Ask for a schedule at the bound, where little is missing, in the last ops of all devices, ever more of them.

        What misses the bound by less than an op is often the last microbatch, which waits here and there for an op that
        could as well follow it. Only all of these waits together gain something, and windows that minimise do not
        find it. That too few ops are free is mostly proved at once.
        """
        value_us, bound_us = self.best.value_us, self.best.bound_us
        if not 0 < value_us - bound_us <= NEAR * value_us:
            return
        order, everything = self.current.by_start, np.ones(len(self.current.start), bool)
        end = int(self.current.end[order].max()) + 1
        until_s = self.limits.part(LAST_SHARE).time_limit_s
        least_work = 0.0 if self.work_left is None else (1 - LAST_SHARE) * self.work_left
        size, growth, asked_work = LAST * self.random.uniform(1, GROWTH), GROWTH, ASKED_WORK
        while size <= min(MOST_LAST, len(order)) and not self._done:
            if self.limits.seconds >= until_s if self.work_left is None else self.work_left <= least_work:
                return
            model = WindowModel(self.current, Window(int(self.current.start[order[-round(size)]]), end, everything))
            model.model.add(model.variables.objective <= self.current.numbering.grid.bound_ticks(bound_us))
            model.model.clear_objective()  # type: ignore[no-untyped-call]
            work = asked_work if self.work_left is None else self.work_left - least_work
            status, _ = self._solve(model, min(asked_work, work), max(SECONDS, (until_s - self.limits.seconds) / 2))
            if status != cp_model.INFEASIBLE:
                asked_work = min(asked_work * MORE_WORK, WORK)
                if growth == GROWTH:
                    size, growth = size / GROWTH, FINE_GROWTH
            size *= growth

    @property
    def _done(self) -> bool:
        if self.limits.cancel.requested or self.limits.reached(self.best.value_us, self.best.bound_us):
            return True
        return self.work_left <= 0 if self.work_left is not None else self.limits.seconds >= self.limits.time_limit_s

    def _step(self) -> None:
        window = choose_window(self.current, self.random, round(self.size))
        status, work = self._solve(WindowModel(self.current, window))
        # Windows grow while they are proved quickly and shrink when they are not.
        proved = status == cp_model.OPTIMAL
        if proved and work < WORK / 4:
            self.size = min(self.size * 1.3, LARGEST)
        elif not proved:
            self.size = max(self.size * 0.8, SMALLEST)

    def _solve(
        self, model: WindowModel, work: float = WORK, seconds: float = SECONDS
    ) -> tuple[cp_model.CpSolverStatus, float]:
        """Solve the model of a window and go on from its schedule: the status, and the work done.

        Limits are those of a window: CP-SAT's deterministic time, and seconds where the clock counts.
        """
        work_limit = work if self.work_left is None else min(work, self.work_left)
        solver = configured_solver(replace(self.limits, gap=0.0, deterministic_limit=work_limit))
        if self.work_left is None:
            solver.parameters.max_time_in_seconds = min(seconds, self.limits.time_left_s)
        # The current schedule is a solution and the model is small: measured, all that comes before search costs more
        # than it saves (three times the seconds a window with it).
        solver.parameters.cp_model_presolve = False
        solver.parameters.linearization_level = 0
        status, work = solve_unless_cancelled(solver, model.model, self.limits.cancel)
        assert status != cp_model.MODEL_INVALID, model.model.validate()
        if self.work_left is not None:
            self.work_left -= work + 1e-4 * len(model.decided)  # the model takes time to build as well
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            orders = model.orders(solver)
            if orders is not None:
                self._accept(orders)
        return status, work

    def _accept(self, orders: Orders) -> None:
        """Go on from the orders unless they are worse; equal ones too, since they lead across plateaus."""
        try:
            candidate = Surroundings.of(self.current.numbering, orders)
        except DeadlockError:  # ops without length at one instant have no order in a window
            return
        if candidate.value_us > self.current.value_us or not candidate.keeps_budgets:
            return
        self.current = candidate
        if candidate.value_us < self.best.value_us:
            if self.microbatch_order is not None:
                orders = with_own_numbers(self.problem, orders, self.microbatch_order)
            self.best = replace(self.best, orders=orders, value_us=candidate.value_us)
            self.on_solution(self.best)
