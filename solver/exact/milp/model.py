"""Solving the mixed-integer program with HiGHS: warm start, incumbents as they come, limits, cancel."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import highspy
import numpy as np

from optpipe.problem import Problem
from solver.bounds.split_backward import split_backward_suffices
from solver.exact.grid import Grid
from solver.exact.incumbent import Incumbent
from solver.exact.milp.options import DEFAULT, Options
from solver.exact.milp.point import Timing, point_of_orders
from solver.exact.milp.program import Program, build, load
from solver.exact.milp.size import refuse_too_large
from solver.limits import Answer, Limits, Start

BOUND_SLACK = 1e-5
"""Units by which a bound of HiGHS is lowered: ten times its tolerances, and at most 1e-8 of the horizon."""


def solve_milp(
    problem: Problem,
    limits: Limits,
    start: Start,
    on_answer: Callable[[Answer], None],
    options: Options = DEFAULT,
) -> Answer:
    """Search with HiGHS from the best start known, reporting every better answer.

    Returns the last answer: its bound holds whether or not the search ended. See `Answer` for infeasibility. Raises
    MethodError, before anything is built, where the model would be too large.
    """
    refuse_too_large(problem)
    search = _Search(problem, limits, start, on_answer, options)
    with limits.cancel.calling(search.stop):
        return search.run()


class _Search(Incumbent):
    """Rounds of building and solving. A much better schedule ends a round: it narrows all windows of the next."""

    def __init__(
        self, problem: Problem, limits: Limits, start: Start, on_answer: Callable[[Answer], None], options: Options
    ) -> None:
        super().__init__(problem, limits, start, on_answer, has_optimum=split_backward_suffices(problem))
        self.options = options
        self.grid = Grid.of(problem, start.horizon_us)
        self.stopped = False

    def stop(self) -> None:
        """End the search soon; HiGHS asks for it every few milliseconds."""
        self.stopped = True

    @property
    def over(self) -> bool:
        """Whether no more time may be spent."""
        return self.stopped or self.limits.seconds >= self.limits.time_limit_s

    def run(self) -> Answer:
        """Rounds until one ends by itself or time is up."""
        while not self.over:
            round_ = _Round(self)
            round_.solve()
            if round_.infeasible and self.orders is None and self.has_optimum:
                return Answer(None, float("inf"), float("inf"), infeasible=True)
            if not round_.outgrown or self.limits.reached(self.value_us, self.bound_us):
                break
        return self.answer

    def program(self) -> Program:
        """The model, with the windows that the best schedule allows."""
        return build(self.problem, self.horizon_us, self.bound_us, self.value_us, self.options)


class _Round:
    """One model and one run of HiGHS on it."""

    def __init__(self, search: _Search) -> None:
        self.search = search
        self.program = search.program()
        variables = self.program.variables
        self.timing = Timing(variables, self.program.matrix, self.program.row_lower)
        self.built_for_us = search.value_us
        self.failure: BaseException | None = None
        self.infeasible = False

    @property
    def outgrown(self) -> bool:
        """Whether the best schedule has become so much better that the model should be built again."""
        search = self.search
        return search.value_us < self.built_for_us * (1 - search.options.rebuild_gain)

    def solve(self) -> None:
        """Run HiGHS until it ends, is stopped, or has outgrown the model."""
        highs = load(self.program)
        self._set_options(highs)
        self._set_start(highs)
        highs.cbMipImprovingSolution.subscribe(self._on_solution)
        for event in (highs.cbMipInterrupt, highs.cbSimplexInterrupt):
            event.subscribe(self._on_interrupt)
        try:
            highs.run()
        finally:
            # The next run in this process may ask for another number of threads.
            highspy.Highs.resetGlobalScheduler(True)
        if self.failure:
            raise self.failure
        self.infeasible = highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible
        if not self.infeasible:
            self._take_last(highs)

    def _take_last(self, highs: highspy.Highs) -> None:
        """What HiGHS ended with: an incumbent that ends the search at once is not always reported before."""
        info = highs.getInfo()
        bound_us = self._proved_us(info.mip_dual_bound)
        if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            self.search.offer(self.timing.orders(np.array(highs.getSolution().col_value)), bound_us)
        self.search.raise_bound(bound_us)

    def _set_options(self, highs: highspy.Highs) -> None:
        limits = self.search.limits
        highs.setOptionValue("time_limit", limits.time_left_s)
        highs.setOptionValue("mip_rel_gap", limits.gap)
        highs.setOptionValue("threads", limits.workers)
        highs.setOptionValue("random_seed", limits.seed % 2**31)

    def _set_start(self, highs: highspy.Highs) -> None:
        if self.search.orders is not None and self.search.options.warm_start:
            solution = highspy.HighsSolution()
            solution.col_value = point_of_orders(self.program.variables, self.search.orders)
            highs.setSolution(solution)

    def _proved_us(self, objective: float) -> float:
        """A bound of HiGHS, raised to the next value that schedules can have; 0 where it has none yet."""
        if not isfinite(objective):
            return 0.0
        return self.search.grid.raised_us((objective - BOUND_SLACK) * self.program.variables.unit_us)

    def _on_solution(self, event: highspy.HighsCallbackEvent) -> None:
        try:
            orders = self.timing.orders(np.array(event.data_out.mip_solution))
            self.search.offer(orders, self._proved_us(event.data_out.mip_dual_bound))
        except BaseException as error:  # HiGHS cannot pass it on: it is raised when HiGHS has stopped
            self.failure = error

    def _on_interrupt(self, event: highspy.HighsCallbackEvent) -> None:
        if self.search.over or self.failure or self.outgrown:
            event.interrupt()
