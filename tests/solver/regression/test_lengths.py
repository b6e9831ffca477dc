"""Instances of unequal lengths: the files are what their seeds give, and their order matters."""

from __future__ import annotations

from statistics import median

import pytest

from instances import instance
from instances.lengths import DISTRIBUTIONS, LONGEST, SHORTEST, SIZES, lengths, of_lengths
from solver.layout.imbalance import published_in_orders


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_files_are_what_is_drawn(distribution: str, p: int, m: int) -> None:
    problem = of_lengths(distribution, p, m)
    assert instance(problem.name).to_data() == problem.to_data()


def test_distributions() -> None:
    many = {name: lengths(name, 1, 2000) for name in DISTRIBUTIONS}
    assert all(SHORTEST <= length <= LONGEST for drawn in many.values() for length in drawn)
    assert 3900 < median(many["lognormal"]) < 4300
    share = sum(length > 4096 for length in many["bimodal"]) / 2000
    assert 0.22 < share < 0.28


def test_the_order_matters() -> None:
    """Under published schedules, all of which fit: as drawn half as long again as in the best of the usual orders."""
    given, *others = published_in_orders(instance("u-p4-m16-bimodal"))
    assert given.value_us > 1.4 * min(one.value_us for one in others)
