"""GPipe, 1F1B, ZB-H1 and zb-auto: published values, memory, and honest refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from optpipe.errors import MethodError
from optpipe.orders import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.finish import over_budget, peak_budgets
from solver.published.gpipe import gpipe
from solver.published.one_f_one_b import one_f_one_b
from solver.published.zb_auto import zb_auto
from solver.published.zero_bubble import zb_h1
from tests.problems import REFERENCE, instance, uniform

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
