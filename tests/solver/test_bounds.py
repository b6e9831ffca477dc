"""Bounds: the Zero Bubble bound where it is known, and never above a proved optimum."""

from __future__ import annotations

import pytest

from solver.bounds import lower_bound_us
from tests.problems import REFERENCE, instance, uniform

PROVED = {name: entry["proved_optimum_us"] for name, entry in REFERENCE.items() if "proved_optimum_us" in entry}
ZERO_BUBBLE = {name: entry["lower_bound_us"] for name, entry in REFERENCE.items() if "lower_bound_us" in entry}


@pytest.mark.parametrize("name", sorted(ZERO_BUBBLE))
def test_equals_the_zero_bubble_bound_on_measured_profiles(name: str) -> None:
    assert lower_bound_us(instance(name)) == ZERO_BUBBLE[name]


@pytest.mark.parametrize("name", sorted(PROVED))
def test_is_never_above_a_proved_optimum(name: str) -> None:
    assert lower_bound_us(instance(name)) <= PROVED[name]


@pytest.mark.parametrize(("budget", "bound_us"), [(2, 306), (4, 296), (8, 276), (14, 246), (16, 240)])
def test_zero_bubble_bound_by_hand(budget: int, bound_us: float) -> None:
    """m (tF + tB + tW) + max(0, (p - 1)(tB + 2 tC) + (p - k) tF) with k = budget / 2."""
    assert lower_bound_us(uniform(4, 8, budget=budget, objective="device_span")) == bound_us


def test_one_microbatch_takes_the_whole_way() -> None:
    assert lower_bound_us(uniform(4, 1)) == 4 * 10 + 4 * 10 + 6 * 1 + 10
