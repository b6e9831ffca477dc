"""Schedules of unequal microbatches made from those of equal ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.build import build_schedule
from solver.microbatch_orders import with_own_numbers


def with_factors(
    schedule: Schedule, factors: Sequence[Mapping[str, float]], order: Sequence[int] | None = None
) -> Schedule:
    """The schedule with costs of their own for each microbatch, which run in `order` if one is given."""
    data = schedule.problem.to_data() | {"microbatch_factors": list(factors)}
    data["microbatch_order"] = "given" if order is None else "free"
    problem = Problem.from_data(data)
    orders = schedule.orders if order is None else with_own_numbers(problem, schedule.orders, order)
    return build_schedule(problem, orders, 0.0, "by hand", 0.0)
