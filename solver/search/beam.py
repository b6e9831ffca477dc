"""Beam search over states of progress: of all prefixes of a schedule with as many ops, those that can still end first.

States know what memory and the order of ops force to come (`solver.exact.progress`), so where one that has lost little
time can be followed to the end, its schedule is often one of the best.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil

from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import within_budgets
from solver.exact.progress import NEVER
from solver.exact.states import Dolls
from solver.limits import Limits
from solver.scale import has_exact_states
from solver.solution import OnSolution, Solution

FIRST_WIDTH = 100
"""States that the first search keeps of each number of ops begun."""

GROWTH = 4
"""Factor by which each further search keeps more."""


def beam_search(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Ever wider searches until the next would outlast the limits, or none left anything out; report better answers.

    Returns `start` where states are not exact (`has_exact_states`). Its bound stays: beams prove nothing.
    """
    if not has_exact_states(problem):
        return start
    answer, width, dolls = start, FIRST_WIDTH, Dolls(problem, limits)
    is_over = dolls.over(1.0)
    while not (is_over() or limits.reached(answer.value_us, answer.bound_us)):
        left = dolls.left
        highest = ceil(Fraction(answer.value_us) / dolls.unit_us) - 1 if answer.value_us < float("inf") else NEVER // 4
        if dolls.beam(width, highest, is_over):
            orders = dolls.orders()
            simulation = simulate(problem, orders)
            if simulation.value_us < answer.value_us and within_budgets(problem, orders, simulation):
                answer = replace(answer, orders=orders, value_us=simulation.value_us)
                on_solution(answer)
        if not dolls.is_cut or (left - dolls.left) * GROWTH > dolls.left:
            break
        width *= GROWTH
    return answer
