"""GPipe, 1F1B, ZB-H1 and zb-auto: published values, memory, and honest refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import REFERENCE, instance, uniform
from optpipe.errors import MethodError
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import build_schedule, over_budget, peak_budgets
from solver.published.one_stage import gpipe, one_f_one_b, zb_h1, zb_h2
from solver.published.zb_auto import zb_auto
from tests.sample import examples
from tests.solver.published.unequal import unequal

MEASURED = sorted(name for name in REFERENCE if name.startswith("zb-"))
PUBLIC_HEURISTIC_US = {name: REFERENCE[name]["zero_bubble_heuristic_us"] for name in MEASURED} | {
    name: entry["best_public"]["value_us"]
    for name, entry in REFERENCE.items()
    if (entry.get("best_public") or {}).get("scheduler") == "sail ZB heuristic"
}


def bubble(problem: Problem, orders: Orders) -> float:
    return round(1 - max(problem.work_us) / simulate(problem, orders).value_us, 4)


@pytest.mark.parametrize("name", [name for name in MEASURED if name.endswith("mem1")])
def test_published_bubble_rates(name: str) -> None:
    """Zero Bubble, table 4, at four digits."""
    problem, published = instance(name), REFERENCE[name]["published_bubble"]
    assert bubble(problem, one_f_one_b(problem)) == published["1F1B"]
    assert bubble(problem, zb_h1(problem)) == published["ZB-H1"]
    assert bubble(problem, zb_auto(problem)) == published["ZB-1p"]


@pytest.mark.parametrize(("name", "span_us"), [("zb-1.5b-p8-m24-mem1", 1310405), ("zb-1.5b-p8-m24-mem2", 1152599)])
def test_zb_auto_reaches_the_published_spans(name: str, span_us: int) -> None:
    problem = instance(name)
    orders = zb_auto(problem)
    assert simulate(problem, orders).value_us == span_us
    assert over_budget(problem, orders) == []


@pytest.mark.parametrize("name", [name for name in MEASURED if name.endswith("mem2")])
def test_published_bubble_rates_at_twice_the_memory(name: str) -> None:
    """Zero Bubble, table 4, ZB-2p at four digits."""
    problem = instance(name)
    assert bubble(problem, zb_auto(problem)) == REFERENCE[name]["published_bubble"]["ZB-2p"]


@pytest.mark.parametrize("name", sorted(PUBLIC_HEURISTIC_US))
def test_zb_auto_is_never_worse_than_the_public_heuristic(name: str) -> None:
    problem = instance(name)
    orders = zb_auto(problem)
    assert simulate(problem, orders).value_us <= PUBLIC_HEURISTIC_US[name]
    assert over_budget(problem, orders) == []


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("method", [one_f_one_b, zb_h1])
def test_memory_of_1f1b(method: Callable[[Problem], Orders], p: int) -> None:
    """Zero Bubble, section 2: ZB-H1 keeps the peak of 1F1B, p microbatches on the first device."""
    problem = uniform(p, 2 * p, backward_weight_bytes=2)
    peaks = peak_budgets(problem, method(problem))
    assert peaks[0] == max(peaks) == 2 * p


def test_gpipe_holds_every_microbatch() -> None:
    problem = uniform(4, 6)
    assert peak_budgets(problem, gpipe(problem)) == [12] * 4
    assert simulate(problem, gpipe(problem)).value_us == (6 + 3) * 30 + 6


def test_1f1b_is_read_with_fused_backward() -> None:
    """69 for p = 8, m = 16 at unit costs; split it would drop to 62."""
    problem = uniform(8, 16, transfer_us=0)
    assert simulate(problem, one_f_one_b(problem)).value_us == 690


@pytest.mark.parametrize("method", [gpipe, one_f_one_b, zb_h1, zb_auto])
def test_refuses_other_placements(method: Callable[[Problem], Orders]) -> None:
    with pytest.raises(MethodError, match="device 0 has 2"):
        method(uniform(2, 2, v_shape=True))


@pytest.mark.parametrize("budget", range(2, 17, 2))
def test_zb_auto_keeps_any_budget_that_holds_a_microbatch(budget: int) -> None:
    problem = uniform(4, 8, budget=budget)
    assert over_budget(problem, zb_auto(problem)) == []


def test_zb_auto_says_how_many_bytes_are_missing() -> None:
    with pytest.raises(MethodError, match=r"needs 2 bytes .* but device 0 has 1: 1 too few"):
        zb_auto(uniform(2, 2, budget=1))


def test_stages_may_sit_on_any_device() -> None:
    data = uniform(3, 4, budget=6).to_data()
    for stage, device in zip(data["stages"], (2, 0, 1), strict=True):
        stage["device"] = device
    problem = Problem.from_data(data)
    orders = zb_auto(problem)
    assert orders.devices[2].compute[0] == Op("F", 0, 0)
    assert simulate(problem, orders).value_us == simulate(uniform(3, 4), zb_auto(uniform(3, 4, budget=6))).value_us


H2_MEASURED = [name for name in REFERENCE if name.startswith("zb-") and name.endswith("mem2")]


@pytest.mark.parametrize("name", H2_MEASURED)
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


@settings(max_examples=examples(50))
@given(st.data())
def test_any_costs_and_microbatches(data: st.DataObject) -> None:
    problem = data.draw(unequal(list(range(data.draw(st.integers(1, 6))))))
    build_schedule(problem, zb_h2(problem), 0, "zb-h2", 0)


def test_h2_refuses_other_placements() -> None:
    with pytest.raises(MethodError, match="device 0 has 2"):
        zb_h2(uniform(2, 2, v_shape=True))
