"""Patterns of slices and of unequal microbatches: a round runs one cycle of microbatches whose costs repeat.

A round is one microbatch in all its slices where microbatches are equal, else as many as their costs take to repeat.
Where their order is free, microbatches are ordered so that costs repeat.
"""

from __future__ import annotations

from dataclasses import replace

from optpipe.problem import Problem
from solver.limits import Limits
from solver.microbatch_orders import Cycle, cycles, in_order, with_own_numbers
from solver.search.annealing.table import budgets_bytes
from solver.search.modulo.pattern import Passes
from solver.search.modulo.search import PatternSearch, run_searches
from solver.solution import OnSolution, Solution


def modulo_with_units(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Orders that repeat one cycle of microbatches in the middle, if they are better than the start's.

    All activations stay on their devices. The start is returned where costs do not repeat, or no pattern fits.
    """
    best = start

    def search(cycle: Cycle) -> PatternSearch:
        own = in_order(problem, cycle.microbatch_order) if problem.has_free_order else problem

        def offer(solution: Solution) -> None:
            nonlocal best
            orders = solution.orders
            if problem.has_free_order and orders is not None:
                orders = with_own_numbers(problem, orders, cycle.microbatch_order)
            best = replace(solution, orders=orders)
            on_solution(best)

        passes = Passes.of(own, cycle.length * problem.slice_count)
        return PatternSearch(own, limits, offer, [passes], budgets_bytes(own))

    run_searches([search(cycle) for cycle in cycles(problem)], limits, start)
    return best
