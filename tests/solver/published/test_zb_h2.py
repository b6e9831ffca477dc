"""ZB-H2: the published bubbles, its memory, and any number of microbatches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.errors import MethodError
from optpipe.simulate import simulate
from solver.finish import finish, peak_budgets
from solver.published.zero_bubble import zb_h2
from tests.problems import REFERENCE, instance, uniform
from tests.solver.published.unequal import unequal

MEASURED = [name for name in REFERENCE if name.startswith("zb-") and name.endswith("mem2")]


@pytest.mark.parametrize("name", MEASURED)
def test_published_bubble_and_memory(name: str) -> None:
    """Zero Bubble, table 4, at four digits; 2p - 1 microbatches on the first device, and no device holds more."""
    problem = instance(name)
    orders = zb_h2(problem)
    bubble = 1 - max(problem.work_us) / simulate(problem, orders).value_us
    assert round(bubble, 4) == REFERENCE[name]["published_bubble"]["ZB-H2"]
    peaks = peak_budgets(problem, orders)
    assert peaks[0] == max(peaks) == (2 * len(problem.stages) - 1) * problem.stages[0].activation_bytes


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_no_bubble_at_unit_costs(p: int) -> None:
    """Zero Bubble, section 2: (p - 1)(tF + tB - 2tW) is 0."""
    problem = uniform(p, 3 * p, transfer_us=0, objective="device_span")
    assert simulate(problem, zb_h2(problem)).value_us == 3 * p * 30


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_any_costs_and_microbatches(data: st.DataObject) -> None:
    problem = data.draw(unequal(list(range(data.draw(st.integers(1, 6))))))
    finish(problem, zb_h2(problem), 0, "zb-h2", 0)


def test_refuses_other_placements() -> None:
    with pytest.raises(MethodError, match="device 0 has 2"):
        zb_h2(uniform(2, 2, v_shape=True))
