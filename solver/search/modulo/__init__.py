"""Modulo scheduling: one microbatch's block of passes, repeated every period, fitted to the costs and the budgets.

Its time does not depend on the number of microbatches, but for writing the orders down.
"""

from optpipe.problem import Problem
from solver.limits import Limits
from solver.search.modulo.modes import modulo_with_modes
from solver.search.modulo.pattern import Pattern
from solver.search.modulo.search import modulo_search
from solver.search.modulo.units import modulo_with_units
from solver.solution import OnSolution, Solution

__all__ = ["Pattern", "modulo_search", "pattern_search"]


def pattern_search(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """One block of a microbatch, or of a cycle of unequal ones, repeated every period."""
    unequal = not problem.has_equal_microbatches
    search = modulo_with_units if unequal else modulo_with_modes if problem.has_modes else modulo_search
    return search(problem, limits, start, on_solution)
