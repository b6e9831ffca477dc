"""Cost of microbatches of unequal lengths: their bubble in each likely order, and without any inequality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optpipe.problem import MicrobatchFactors, Problem
from optpipe.stage import UnitFactors
from solver.limits import Limits
from solver.microbatch_orders import in_order, likely_orders
from solver.strategy import SharedIncumbent
from solver.warm_starts import offer_published


@dataclass(frozen=True)
class InOrder:
    """The best published schedule of the microbatches in one order, and what it leaves idle of its busiest device."""

    name: str
    microbatch_order: Sequence[int]
    method: str
    value_us: float
    bubble: float


def published_in_orders(problem: Problem) -> list[InOrder]:
    """The best published schedule in the given order, then in each of the likely ones (`likely_orders`).

    An order in which not even one microbatch at a time keeps the budgets is left out.
    """
    orders = [("given", range(problem.microbatches)), *likely_orders(problem)]
    found = (best_published(in_order(problem, order), name, order) for name, order in orders)
    return [one for one in found if one is not None]


def best_published(problem: Problem, name: str, order: Sequence[int]) -> InOrder | None:
    """The best published schedule of a problem whose order is given; `name` and `order` say which it is."""
    shared = SharedIncumbent(problem, Limits(float("inf")), None)
    offer_published(problem, shared, adapts_to_memory=False)
    best = shared.best
    if best.orders is None:
        return None
    bubble = 1 - max(problem.work_us) / best.value_us if best.value_us else 0.0
    return InOrder(name, list(order), best.method, best.value_us, bubble)


def without_imbalance(problem: Problem, factors: Sequence[dict[str, float]] | None = None) -> Problem:
    """The problem with equal microbatches: of these factors, by default of the same work and sizes in total."""
    own = problem.microbatch_factors
    assert own is not None, "only unequal microbatches have an imbalance"
    columns = zip(*(entry.by_name for entry in own), strict=True)
    means = {name: float(sum(column)) / len(own) for name, column in zip(UnitFactors._fields, columns, strict=True)}
    equal = [MicrobatchFactors().replaced(**entry) for entry in factors or [means] * len(own)]
    return problem.replaced(microbatch_factors=equal, microbatch_order="given")
