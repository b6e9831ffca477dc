"""Cost of unequal microbatches in each likely order, on a case that is known."""

from __future__ import annotations

import pytest

from instances import instance
from optpipe.simulate import simulate
from solver.layout.imbalance import best_published, published_in_orders, without_imbalance
from solver.microbatch_orders import in_order
from solver.published.one_stage import one_f_one_b
from tests.unequal import times, unequal


def test_the_pinned_orders() -> None:
    """Costs 1 to 4 twice under 1F1B on four devices: 106 as given, 82 in the best of the likely orders."""
    found = published_in_orders(instance("u-p4-m8-b4"))
    assert (found[0].name, found[0].value_us) == ("given", 106)
    assert found[0].bubble == 1 - 60 / 106
    best = min(found, key=lambda one: one.value_us)
    assert best.value_us == 82
    for one in found:
        problem = in_order(instance("u-p4-m8-b4"), one.microbatch_order)
        assert one.method == "1f1b"
        assert simulate(problem, one_f_one_b(problem)).value_us == one.value_us


def test_equal_microbatches_of_the_same_work() -> None:
    problem = unequal(2, 4, microbatch_factors=times(1, 2, 4, 1), microbatch_order="free")
    equal = without_imbalance(problem)
    assert equal.work_us == problem.work_us
    assert not equal.has_free_order
    one = best_published(equal, "equal", range(4))
    assert one is not None
    assert (one.value_us, one.bubble) == (26, 1 - 24 / 26)  # ZB-H1; an order that begins with a short one has 25
    other = without_imbalance(problem, [{"time": 1.5}] * 4)
    assert other.work_us == pytest.approx([18, 18])


def test_microbatches_that_take_no_time_have_no_bubble() -> None:
    instant = {"forward_us": 0, "backward_input_us": 0, "backward_weight_us": 0}
    found = published_in_orders(unequal(2, 2, **instant, microbatch_factors=times(1, 2), microbatch_order="free"))
    assert {(one.value_us, one.bubble) for one in found} == {(0, 0)}


def test_orders_that_fit_nowhere_are_left_out() -> None:
    assert published_in_orders(unequal(2, 2, budget=3, microbatch_factors=times(1, 2), microbatch_order="free")) == []
