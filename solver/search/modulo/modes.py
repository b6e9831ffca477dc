"""Patterns where activations may be recomputed: rounds with a mode for each position, and plans with shares.

A pattern of one microbatch runs the same ops every period, so by itself it recomputes all microbatches of a stage or
none. Rounds of several may recompute some of them (`mode_rounds`). A plan takes only the order from a pattern: the
pattern is searched with the memory of a choice of variants (`solver.by_stage`), and with backwards that are longer by
their recomputation times a share; then every microbatch for which there is memory along that order is kept. The shares
move towards what the best orders recompute.

There is a plan for each choice. All begin with the same part of the limits and with shares of 1; then ever fewer of
them, the best, go on (successive halving, Jamieson and Talwalkar 2016). Only the last is planned for all microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optpipe.ops import Floats, Ints, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import within_budgets
from solver.by_stage import ByStage, choices, keep_what_fits
from solver.limits import Limits
from solver.search.modulo.mode_rounds import begin_rounds, can_alternate
from solver.search.modulo.search import go_on, modulo_search
from solver.serial import serial_orders
from solver.solution import OnSolution, Solution
from solver.variants import Variant

PLANS, BEGIN, AGAIN = 0.4, 0.6, 0.85
"""Shares of the time at which plans, first rounds, and the best plan again end; then the best rounds go on."""

FEW = 8
"""Most microbatches a device with which plans are compared: orders of more take longer to build."""


@dataclass
class _Plan:
    """A choice of variants, the share of each stage's microbatches that is recomputed, and its best value so far."""

    chosen: Sequence[Variant]
    shares: Floats
    value_us: float = float("inf")


def modulo_with_modes(problem: Problem, limits: Limits, start: Solution, on_solution: OnSolution) -> Solution:
    """Orders that repeat one block in the middle, a mode for every microbatch, if they are better than the start's.

    The bound is that of the start: a pattern proves nothing.
    """
    plans = [_Plan(by_stage.chosen, np.ones(len(problem.stages))) for by_stage in choices(problem)]
    able = [plan for plan in plans if can_alternate(plan.chosen) and "mode-rounds" not in limits.without]
    if not able:
        return _search_plans(problem, limits, plans, start, on_solution)
    counted = limits.deterministic_limit is not None

    def part(begin: float, end: float) -> Limits:
        """From one share of the limits to another: of all the work, or of the time that is left."""
        return limits.part(end - begin if counted else (end - begin) / (1 - begin))

    best = _search_plans(problem, part(0, PLANS), plans, start, on_solution)
    chosen = min(able, key=lambda plan: plan.value_us).chosen
    if limits.cancel.requested or limits.reached(best.value_us, best.bound_us):
        return best
    rounds, best = begin_rounds(ByStage(problem, chosen), part(PLANS, BEGIN), best, on_solution)
    best = _go_on(min(plans, key=lambda plan: plan.value_us), problem, part(BEGIN, AGAIN), best, on_solution)
    return go_on(rounds, part(AGAIN, 1), best)


def _search_plans(
    problem: Problem, limits: Limits, plans: Sequence[_Plan], start: Solution, on_solution: OnSolution
) -> Solution:
    """Orders of plans, ever fewer of them for ever longer."""
    few = min(problem.microbatches, FEW * len(problem.devices))
    short = problem.with_microbatches(few) if few < problem.microbatches else problem
    sizes = [len(plans) >> halved for halved in range(len(plans).bit_length())]
    counted = limits.deterministic_limit is not None
    best, turn = start, 0
    for rounds_left, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
        asked = short if rounds_left > 1 else problem
        plans = sorted(plans, key=lambda plan: plan.value_us)[:size]
        for k, plan in enumerate(plans):
            if limits.cancel.requested or limits.reached(best.value_us, best.bound_us):
                return best
            # In equal parts: of all the work, or of the time that is left when the turn comes.
            share = 1 / (len(sizes) * size) if counted else 1 / (size - k + (rounds_left - 1) * size)
            part = replace(limits.part(share), seed=limits.seed + turn)
            if asked is problem:
                best = _go_on(plan, problem, part, best, on_solution)
            else:
                _go_on(plan, asked, part, Solution(), lambda _: None)
            turn += 1
    return best


def _go_on(plan: _Plan, problem: Problem, limits: Limits, best: Solution, on_solution: OnSolution) -> Solution:
    """Search patterns of a plan, and move its shares halfway to what its best orders recompute.

    Returns the best answer after it.
    """
    by_stage = ByStage(problem, plan.chosen)
    plain = by_stage.plain_at(plan.shares.tolist())
    floor = serial_orders(plain)
    if floor is None:
        return best
    found: tuple[float, Orders] | None = None

    def offer(solution: Solution) -> None:
        nonlocal best, found
        orders = by_stage.with_modes(solution.orders) if solution.orders is not None else None
        if orders is None:
            return
        orders = keep_what_fits(problem, orders)
        simulation = simulate(problem, orders)
        if not within_budgets(problem, orders, simulation):
            return
        if found is None or simulation.value_us < found[0]:
            found = simulation.value_us, orders
        if simulation.value_us < best.value_us:
            best = replace(best, orders=orders, value_us=simulation.value_us)
            on_solution(best)

    modulo_search(plain, limits, Solution(floor, simulate(plain, floor).value_us), offer)
    if found is not None and found[1].modes is not None:
        plan.value_us = min(plan.value_us, found[0])
        plan.shares = (plan.shares + recomputed_shares(problem, found[1].modes)) / 2
    return best


def recomputed_shares(problem: Problem, modes: Ints) -> Floats:
    """For each stage the share of its microbatches that are recomputed; `modes` as in `Orders.modes`."""
    recomputes = [[mode.recomputes for mode in stage.choices] for stage in problem.stages]
    return np.array([np.take(by_mode, of_stage).mean() for by_mode, of_stage in zip(recomputes, modes, strict=True)])
