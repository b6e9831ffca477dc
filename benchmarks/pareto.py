"""Pareto front of memory and bubble: minimum period and value for each budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from optpipe.ops import Ints, Orders
from optpipe.problem import Problem
from solver.search.modulo.beam import find_places
from solver.search.modulo.ends import Ends, Filler, few_units, first_ends
from solver.search.modulo.pattern import Passes, Pattern, orders_from_pattern, pattern_at
from solver.search.modulo.search import LANES, LATE_ROUNDS, LEANS

STRETCHED_ROUNDS = (0, 1, 2, 4, 7)
"""Most rounds by which blocks are stretched."""

TRIED_ENDS = 3
"""Patterns per budget whose warm-up and cool-down are compared."""


@dataclass(frozen=True)
class CurvePoint:
    """Point of the front: the smallest period within a budget, and orders for the problem's microbatches."""

    budget_bytes: int
    pattern: Pattern
    orders: Orders
    value_us: float


def patterns_found(problem: Problem, periods_us: Sequence[float], width: int, seed: int = 0) -> list[Pattern]:
    """Find patterns at these periods by searches of this width, regardless of memory."""
    rng = np.random.default_rng(seed)
    found = []
    for period_us, lanes, lean in product(periods_us, LANES, LEANS):
        passes = Passes.of(problem, lanes)
        round_us = period_us * lanes
        places = find_places(passes, round_us, width, lean, rng)
        found += [pattern_at(passes, place, round_us) for place in places]
    return [pattern for pattern in found if pattern.keeps_order]


def memory_curve(problem: Problem, patterns: Sequence[Pattern], budgets_bytes: Sequence[int]) -> list[CurvePoint]:
    """Return the best pattern for each budget (the same on every device); budgets that none keeps are left out.

    Budgets rise: what fits in one fits in the next.
    """
    points: list[CurvePoint] = []
    for budget in budgets_bytes:
        fitting = [pattern for pattern in patterns if pattern.peak_bytes.max() <= budget]
        fitting.sort(key=lambda pattern: (pattern.period_us, pattern.block_us))
        if fitting:
            point = _point(problem, budget, fitting)
            if points and points[-1].value_us < point.value_us:
                point = replace(point, orders=points[-1].orders, value_us=points[-1].value_us)
            points.append(point)
    return points


def _point(problem: Problem, budget: int, fitting: list[Pattern]) -> CurvePoint:
    """Point with the smallest period, and the best value among the patterns with the smallest periods."""
    budgets = np.full(len(problem.devices), budget, np.int64)
    passes = Passes.of(problem)

    def filler(pattern: Pattern, microbatches: int) -> Filler:
        return Filler(pattern, passes, microbatches, budgets, problem.objective == "device_span")

    best: tuple[float, Pattern, Ends] | None = None
    for base in fitting[:TRIED_ENDS]:
        for pattern in _stretches(base, budgets, passes.stages):
            few = few_units(pattern, problem.microbatches)
            value, ends = first_ends(filler(pattern, few))
            value += (problem.microbatches - few) * pattern.period_us
            if best is None or value < best[0]:
                best = (value, pattern, ends)
    assert best is not None
    whole = filler(best[1], problem.microbatches)
    orders = orders_from_pattern(problem, whole.orders(best[2]))
    return CurvePoint(budget, fitting[0], orders, whole.value_us(best[2]))


def _stretches(pattern: Pattern, budgets: Ints, stages: int) -> Iterator[Pattern]:
    """Yield the pattern, and variants with later and later B and W, as long as they keep the budgets."""
    for rounds, late in product(STRETCHED_ROUNDS, LATE_ROUNDS):
        longer = pattern.stretched(stages, rounds)
        if (longer.peak_bytes <= budgets).all():
            yield longer.with_late_weights(budgets, late)


def with_budget(problem: Problem, budget_bytes: int, microbatches: int) -> Problem:
    """Copy a problem with another budget on every device and another number of microbatches.

    It is made anew, because a copy would keep what the first one has computed of itself (`Problem.work_us`).
    """
    data = problem.to_data()
    devices = [device | {"memory_bytes": budget_bytes} for device in data["devices"]]
    return Problem.from_data(data | {"devices": devices, "microbatches": microbatches})


def minimum_period_us(problem: Problem) -> float:
    """Lower bound on the period of any periodic schedule.

    A device works off one microbatch's passes a period. And it holds each stage's activation from F to the end of B,
    at least as long as one microbatch alone takes through the stages behind, and what B leaves for as long as W runs:
    the integral of that over a period cannot exceed the budget times the period. What may leave to the host does not
    count.
    """
    passes = Passes.of(problem)
    start = passes.alone_us()
    end = start + passes.duration_us
    count = passes.stages
    moved = np.array([stage.offload.bytes if stage.offload else 0 for stage in problem.stages])
    lives = end[count : 2 * count] - start[:count]
    held = (passes.stage_bytes - moved) * lives + passes.weight_bytes * passes.duration_us[2 * count :]
    areas = np.bincount(passes.device[:count], held, passes.devices)
    floors = [
        area / device.memory_bytes
        for area, device in zip(areas.tolist(), problem.devices, strict=True)
        if device.memory_bytes
    ]
    return float(max([*floors, float(passes.work_us().max())]))
