"""Every search on every feature: it takes the problem, or says by name that it does not; no proof contradicts another.

A new search is here by its entry in `METHODS`, a new feature by a line.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import get_args

import pytest

from instances import HALF, uniform
from optpipe.errors import MethodError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.limits import Limits
from solver.methods import METHODS, Feature
from solver.serial import serial_orders
from solver.solve import solve
from tests.optpipe.test_spread import vocabulary
from tests.recomputing import recomputing
from tests.unequal import times, unequal

SEARCHES = [name for name, method in METHODS.items() if method.kind not in ("published", "custom")]
ROUNDING_US = 1e-6


def with_stages(devices: int, count: int, **fields: object) -> Problem:
    """Equal stages in a line, of which the first `count` have other fields."""
    data = uniform(devices, 4).to_data()
    for stage in data["stages"][:count]:
        stage |= fields
    return Problem.from_data(data)


PAIRS = [(f, b) for device in ((0, 3), (1, 2)) for f, b in product(device, device)]
"""Stages of one device along a V."""

PROBLEMS = {
    "offload": uniform(2, 4, budget=4, offload=HALF),
    "shared channels": uniform(2, 4, budget=4, offload=HALF, copy_channels={"duplex": False, "shared_by": [[0, 1]]}),
    "activation modes": recomputing(2, 4, budget=14),
    "device span": uniform(2, 4, objective="device_span"),
    "two stages a device": uniform(2, 4, v_shape=True),
    "stages without a backward": with_stages(3, 1, backward="none"),
    "blocks": uniform(
        2, 4, v_shape=True, overlaps=[{"forward_stage": f, "backward_stage": b, "us": 25} for f, b in PAIRS]
    ),
    "backwards in one piece": with_stages(2, 2, split_backward=False),
    "slices": unequal(2, 4, slices={"count": 2}),
    "costs of units": unequal(2, 4, microbatch_factors=times(1, 2, 1, 2)),
    "free order": unequal(2, 4, microbatch_factors=times(1, 2, 1, 2), microbatch_order="free"),
    "spread passes": Problem.from_data(vocabulary(2, 4, lag_us=1)),
}


@cache
def answer(name: str, feature: str) -> Schedule | MethodError:
    """The schedule that a search finds in little work, or its refusal of the problem."""
    try:
        return solve(PROBLEMS[feature], name, Limits(workers=1, deterministic_limit=0.1))
    except MethodError as error:
        return error


def test_every_feature_that_a_method_may_lack_is_here() -> None:
    assert set(get_args(Feature)) <= PROBLEMS.keys()


@pytest.mark.parametrize("feature", PROBLEMS)
@pytest.mark.parametrize("name", SEARCHES)
def test_a_feature_is_taken_or_refused(name: str, feature: str) -> None:
    """A search that takes the problem improves on one microbatch at a time, by a valid schedule."""
    found, serial = answer(name, feature), serial_orders(PROBLEMS[feature])
    assert serial is not None
    if feature in get_args(Feature) and feature not in METHODS[name].takes:
        assert str(found).startswith(f"{name} ")
    else:
        assert isinstance(found, Schedule)
        assert verify(found).ok
        assert found.bound_us <= found.value_us < simulate(PROBLEMS[feature], serial).value_us


@pytest.mark.parametrize("feature", PROBLEMS)
def test_no_search_proves_what_another_disproves(feature: str) -> None:
    answers = {name: answer(name, feature) for name in SEARCHES}
    found = {name: schedule for name, schedule in answers.items() if isinstance(schedule, Schedule)}
    assert len(found) > 1
    for (one, proved), (other, schedule) in product(found.items(), repeat=2):
        assert proved.bound_us <= schedule.value_us + ROUNDING_US, (one, other)
