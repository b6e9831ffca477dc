"""The bound from states of progress: of a device, of two, of ever more of them, then of the whole problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil

from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import within_budgets
from solver.exact.progress import NEVER
from solver.exact.relaxation import parts, projected
from solver.exact.states import Dolls
from solver.limits import Limits
from solver.scale import handles_states
from solver.solution import OnSolution, Solution

PART_SHARE = 0.2
"""Largest share of the time or work left that a part may take."""

FEW_OPS = 400
"""Number of F and B up to which the whole problem is asked at once: its parts take as long, and prove less."""

MOST_OPS = 1_000
"""Number of F and B up to which the whole problem is asked even where a part of it has too many states."""


def state_bound(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """A better bound from the least values of ever more of the last microbatches, and orders if some reach it.

    What is proved for the last microbatches is a tail of their first F in the search for more of them (Russian doll
    search, Verfaillie, Lemaitre and Schiex 1996). One device has few states, and so have two, the others as delays.
    What they prove of each number of microbatches is known where twice as many devices are asked, and then the whole.
    Reports each better bound of the whole. Returns `start` where problems of the kind have no states
    (`handles_states`).
    """
    if not handles_states(problem):
        return start
    answer, stages, share_left = start, range(len(problem.stages)), 1.0
    known, ops = [0] * (problem.microbatches + 1), 2 * len(stages) * problem.microbatches
    for kept in _parts(problem) if ops > FEW_OPS else ():
        if limits.cancel.requested or limits.reached(answer.value_us, answer.bound_us):
            break
        share = PART_SHARE * (1.0 if limits.deterministic_limit is None else share_left)
        share_left -= share
        dolls = Dolls(projected(problem, kept), limits.part(share), problem, kept)
        answer = _raised(answer, dolls, known, on_solution)
        if not dolls.is_reached:
            if ops > MOST_OPS:
                return answer
            break
    if limits.cancel.requested or limits.reached(answer.value_us, answer.bound_us):
        return answer
    dolls = Dolls(problem, limits if limits.deterministic_limit is None else limits.part(share_left))
    answer = _raised(answer, dolls, known, on_solution)
    if dolls.is_reached:
        orders = dolls.orders()
        simulation = simulate(problem, orders)
        if simulation.value_us < answer.value_us and within_budgets(problem, orders, simulation):
            answer = Solution(orders, simulation.value_us, answer.bound_us)
            on_solution(answer)
    return answer


def _parts(problem: Problem) -> Iterator[Sequence[int]]:
    """Stages of parts that begin with the device of stage 0, each of twice as many devices as the one before."""
    devices = 1
    for kept in parts(problem, problem.stages[0].device):
        if len({problem.stages[s].device for s in kept}) >= devices:
            yield kept
            devices *= 2


def _raised(answer: Solution, dolls: Dolls, known: list[int], on_solution: OnSolution) -> Solution:
    """Raise the bound by these dolls, from the ticks `known` of each number of microbatches, which are updated."""
    dolls.known = known
    highest = ceil(Fraction(answer.value_us) / dolls.unit_us) - 1 if answer.value_us < float("inf") else NEVER
    for proved in dolls.bounds(highest):
        bound_us = float(proved * dolls.unit_us)
        if bound_us > answer.bound_us:
            answer = replace(answer, bound_us=bound_us)
            on_solution(answer)
    known[:] = dolls.least
    return answer
