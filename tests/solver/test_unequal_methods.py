"""Methods on slices, unequal microbatches, a free order and passes: each is right, or names what to use instead."""

from __future__ import annotations

from typing import Any

import pytest

from optpipe.errors import MethodError
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.adapt import adapt_orders
from solver.limits import Limits
from solver.methods import METHODS
from solver.searches import SEARCHES
from solver.serial import serial_orders
from solver.solution import Solution
from solver.solve import solve
from solver.warm_starts import repeated_published
from tests.optpipe.test_spread import vocabulary
from tests.recomputing import recomputing
from tests.unequal import times, unequal

PROBLEMS = {
    "slices": unequal(2, 4, slices={"count": 2}),
    "costs of units": unequal(2, 4, microbatch_factors=times(1, 2, 1, 2)),
    "free order": unequal(2, 4, microbatch_factors=times(1, 2, 1, 2), microbatch_order="free"),
    "spread passes": Problem.from_data(vocabulary(2, 4, lag_us=1)),
    "both": unequal(2, 2, microbatch_factors=times(1, 2), slices={"count": 2, "factors": {"forward": [1, 2]}}),
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.kind == "published"])
def test_published_schedules_are_valid_or_refused_by_name(name: str, problem: str) -> None:
    """A refusal for what differs names a method that takes it; methods that need other placements refuse those."""
    chosen, method = PROBLEMS[problem], METHODS[name]
    needs = {
        "slices": chosen.slice_count > 1,
        "costs of units": chosen.has_factors,
        "free order": chosen.has_free_order,
        "spread passes": bool(chosen.spread),
    }
    able = method.takes.issuperset(feature for feature, needed in needs.items() if needed)
    try:
        schedule = solve(chosen, name, Limits(time_limit_s=10))
    except MethodError as error:
        if not able:
            text = str(error)
            assert text.startswith(name)
            assert any(other in text.split("Maybe use one of ")[1] for other in ("gpipe", "1f1b", "vocab-2"))
    else:
        assert able
        assert verify(schedule).ok
        assert schedule.bound_us <= schedule.value_us


ALIKE = {
    "modes": recomputing(2, 40, budget=14),
    "offload": unequal(2, 40, budget=8, offload={"bytes": 2, "offload_us": 1, "reload_us": 1}),
    "plain": unequal(2, 40, budget=8),
}


@pytest.mark.parametrize("problem", ALIKE)
@pytest.mark.parametrize("search", ["pattern", "lists", "repeated", "adapted"])
def test_factors_of_1_say_nothing(search: str, problem: str) -> None:
    """Searches that begin with fewer microbatches make the same of a problem whose factors are all 1."""
    plain = ALIKE[problem]
    ones = plain.from_data(plain.to_data() | {"microbatch_factors": times(*[1] * plain.microbatches)})

    def outcome(problem: Problem) -> Any:
        limits = Limits(float("inf"), workers=1, deterministic_limit=0.02)
        orders = serial_orders(problem)
        assert orders is not None
        start = Solution(orders, simulate(problem, orders).value_us)
        if search == "repeated":
            make = METHODS["1f1b"].orders
            assert make is not None
            return repeated_published(make, problem.without_modes()).devices
        if search == "adapted":
            few = problem.with_microbatches(20)
            return adapt_orders(problem, serial_orders(few) or orders, few.microbatches) is not None
        answer = SEARCHES[search](problem, limits, start, lambda _: None)
        return answer.value_us, answer.bound_us

    assert outcome(ones) == outcome(plain)


def test_1f1b_of_unequal_microbatches_in_their_order() -> None:
    """Costs 1, 2, 3, 4 twice on four stages of F = c, BW = 2 c: 106 (docs/concepts)."""
    problem = unequal(4, 8, microbatch_factors=times(1, 2, 3, 4, 1, 2, 3, 4))
    assert solve(problem, "1f1b").value_us == 106
    descending = unequal(4, 8, microbatch_factors=times(1, 2, 3, 4, 4, 3, 2, 1))
    assert solve(descending, "1f1b").value_us == 82


def test_gpipe_of_slices() -> None:
    problem = unequal(2, 2, slices={"count": 2, "factors": {"forward": [1, 2], "backward_input": [1, 3]}})
    schedule = solve(problem, "gpipe")
    assert str(schedule.orders.devices[0].compute) == "OpArray(F0.0 F0.1 F0.2 F0.3 BW0.1 BW0.0 BW0.3 BW0.2)"
    assert verify(schedule).ok


def test_auto_finds_a_schedule_of_slices() -> None:
    data = unequal(2, 2, budget=8, slices={"count": 2}).to_data()
    schedule = solve(Problem.from_data(data), "auto", Limits(time_limit_s=10))
    assert verify(schedule).ok
