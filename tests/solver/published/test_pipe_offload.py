"""GIS, GIS-H, PO-H and PO-F: the paper's peaks and bubbles, the search within budgets, and honest refusals."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from re import search
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import REFERENCE, instance
from optpipe.errors import MethodError
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import build_schedule, over_budget, peak_budgets
from solver.published.pipe_offload import gis, gis_h, po_f, po_h
from tests.sample import examples

Method = Callable[[Problem], Orders]

SHARED = [f"d-{name}-make" for name in ("p4-m8-o1-mo1-b1o2-interleaved2", "p4-m8-o1-mo1-b1o2-interleaved4")]
SHARED += [f"d-{name}-make" for name in ("p8-m16-o1-mo1-b1o4-interleaved2", "p8-m16-o1-mo1-b1o4-interleaved4")]
SHARED += [f"{name}-pairs" for name in SHARED if "interleaved4" in name]
SHARED += ["d-p16-m32-o1-mo1-b1o4-interleaved2-make"]


def interleaved(
    d: int,
    v: int,
    m: int,
    *,
    times: tuple[int, int, int] = (1, 1, 1),
    k: float | None = None,
    budget: int | None = None,
    **channels: Any,
) -> Problem:
    """Equal stages with an activation of one byte that is freed at W, and copies of k times the compute, both ways."""
    copy_us = (k or 0) * sum(times) / 2
    stage = {
        "forward_us": times[0],
        "backward_input_us": times[1],
        "backward_weight_us": times[2],
        "activation_bytes": 1,
        "backward_weight_bytes": 1,
        "offload": {"bytes": 1, "offload_us": copy_us, "reload_us": copy_us} if k else None,
    }
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": m,
            "devices": [{"memory_bytes": budget}] * d,
            "stages": [{"device": s % d, **stage} for s in range(d * v)],
            "copy_channels": channels,
        }
    )


def bubble_us(problem: Problem, orders: Orders) -> float:
    return simulate(problem, orders).value_us - max(problem.work_us)


def copies(orders: Orders) -> int:
    return sum(len(device.offload) for device in orders.devices)


@pytest.mark.parametrize(
    ("d", "v", "m", "group"),
    [
        (d, v, m, group)
        for d, v, m in [(4, 2, 8), (5, 2, 30), (6, 3, 30), (8, 2, 32), (8, 3, 32), (8, 4, 40)]
        for group in range((d + 1) // 2, d + 1)
    ],
)
def test_gis_h_peak_and_bubble(d: int, v: int, m: int, group: int) -> None:
    """PipeOffload: peak g (v - 1) + d chunks, bubble of GIS and (d - g)(v - 1) F more.

    Many of these m do not divide into groups of g.
    """
    problem = interleaved(d, v, m)
    orders = gis_h(problem, group)
    assert max(peak_budgets(problem, orders)) == group * (v - 1) + d
    assert bubble_us(problem, orders) == 2 * (d - 1) + (d - group) * (v - 1)


@pytest.mark.parametrize("times", [(1, 1, 1), (10, 12, 9), (2, 3, 2), (4, 4, 3)])
def test_gis_peak_and_bubble(times: tuple[int, int, int]) -> None:
    """PipeOffload: peak d v chunks, bubble (d - 1)(F + B), also where a pass is not of unit costs."""
    problem = interleaved(8, 3, 32, times=times)
    assert max(peak_budgets(problem, gis(problem))) == 24
    assert bubble_us(problem, gis(problem)) == 7 * (times[0] + times[1])


@pytest.mark.parametrize("m", [1, 3, 5, 7, 9, 13, 30, 33])
@pytest.mark.parametrize("group", [4, 5, 7, 8])
def test_any_number_of_microbatches(m: int, group: int) -> None:
    problem = interleaved(8, 3, m)
    orders = gis_h(problem, group)
    build_schedule(problem, orders, 0, "gis-h", 0)
    assert max(peak_budgets(problem, orders)) <= group * 2 + 8


@pytest.mark.parametrize(("budget", "group"), [(12, 4), (13, 5), (15, 7), (99, 8), (None, 8)])
def test_gis_h_takes_the_best_group_within_the_budget(budget: int | None, group: int) -> None:
    problem = interleaved(8, 2, 32, budget=budget)
    assert gis_h(problem).devices == gis_h(problem, group).devices


@pytest.mark.parametrize("duplex", [True, False])
@pytest.mark.parametrize("k", [0.6, 0.9])
@pytest.mark.parametrize(("method", "peak"), [(po_h, 6), (po_f, 5)])
@pytest.mark.parametrize("limited", [False, True])
def test_published_peaks_with_offload(method: Method, peak: int, k: float, duplex: bool, limited: bool) -> None:
    """PipeOffload's block repeated evenly: peak 6 and 3 to 5 chunks, bubble 23 passes, d = 8, v = 2, m = 32."""
    problem = interleaved(8, 2, 32, k=k, duplex=duplex, budget=peak if limited else None)
    orders = method(problem)
    build_schedule(problem, orders, 0, "po", 0)
    assert max(peak_budgets(problem, orders)) <= peak
    assert bubble_us(problem, orders) <= 23 + 1e-9
    assert limited or bubble_us(problem, orders) == pytest.approx(23)


@pytest.mark.parametrize("name", SHARED)
def test_never_worse_than_public_schedulers(name: str) -> None:
    problem = instance(name)
    orders = po_f(problem)
    assert over_budget(problem, orders) == []
    assert simulate(problem, orders).value_us <= REFERENCE[name]["best_public"]["value_us"]


def test_offloads_no_more_than_the_budget_asks_for() -> None:
    moved = [copies(po_h(interleaved(8, 2, 32, k=0.6, budget=budget))) for budget in (6, 12, 16)]
    assert moved == sorted(moved, reverse=True)
    assert moved[2] <= moved[0] / 2


@pytest.mark.parametrize("share", [{}, {"shared_by": [[0, 1], [2, 3]]}])
def test_a_shared_channel_alternates_directions(share: dict[str, Any]) -> None:
    """PipeOffload: one D2H and one H2D in turn, also where two devices share the channel."""
    problem = interleaved(4, 2, 32, k=0.4, duplex=False, **share)
    orders = po_f(problem)
    for channel in orders.channels:
        middle = [op.kind for op in channel[len(channel) // 4 : -len(channel) // 4]]
        assert max(len(list(run)) for _, run in groupby(middle)) <= 2


def test_devices_behind_one_switch_copy_in_opposite_directions() -> None:
    """With a channel a direction shared by a pair, one device offloads while the other reloads."""
    problem = interleaved(4, 2, 32, k=0.4, shared_by=[[0, 1], [2, 3]])
    played = simulate(problem, po_f(problem))
    spans = [
        (played.start_us[k], played.end_us[k], op.kind, problem.stages[op.stage].device)
        for k, op in enumerate(played.ops)
        if op.kind in "OR"
    ]
    beside = {
        (kind == other_kind, device == other)
        for start, _, kind, device in spans
        for other_start, other_end, other_kind, other in spans
        if other_start < start < other_end and device // 2 == other // 2
    }
    assert (False, False) in beside
    assert not any(same_direction for same_direction, _ in beside)


@pytest.mark.parametrize("duplex", [True, False])
def test_po_f_refuses_copies_that_cannot_hide(duplex: bool) -> None:
    with pytest.raises(MethodError, match=r"po-f refuses at k = 1\.2: .* Maybe use po-h"):
        po_f(interleaved(8, 2, 32, k=1.2, duplex=duplex))
    assert copies(po_h(interleaved(8, 2, 32, k=1.2, duplex=duplex)))
    with pytest.raises(MethodError, match=r"po-h refuses at k = 1\.2"):
        po_h(interleaved(8, 2, 32, k=2.4, duplex=duplex))


@pytest.mark.parametrize("method", [gis, gis_h, po_h, po_f])
def test_refuses_other_placements(method: Method) -> None:
    data = interleaved(4, 2, 4, k=0.6).to_data()
    with pytest.raises(MethodError, match="at least 2, but 4 stages on 4 devices are 1"):
        method(Problem.from_data({**data, "stages": data["stages"][:4]}))
    with pytest.raises(MethodError, match=r"stages\[4\]\.device is 3, but 4 mod 4 devices is 0"):
        method(Problem.from_data({**data, "stages": [*data["stages"][:4], data["stages"][3]]}))


def test_refusals_say_how_much() -> None:
    with pytest.raises(MethodError, match="needs 12 B on device 0, but its budget is 11 B: 1 B too few"):
        gis_h(interleaved(8, 2, 32, budget=11))
    with pytest.raises(
        MethodError, match="po-f as published needs 3 B on device 0, but its budget is 0 B: 3 B too few"
    ):
        po_f(interleaved(8, 2, 32, k=0.6, budget=0))
    with pytest.raises(MethodError, match=r"stages 0 to 7, but .* null in all"):
        po_h(interleaved(8, 2, 32))
    with pytest.raises(MethodError, match="groups of 4 to 8 microbatches, not 3"):
        gis_h(interleaved(8, 2, 32), 3)


@st.composite
def interleaved_problems(draw: st.DrawFn) -> Problem:
    """Unequal stages, workspace, budgets, host memory, every kind of channel; what the methods' placement allows."""
    d, v = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    times = st.one_of(st.integers(1, 9), st.sampled_from([0, 0.1, 2.25]))

    def stage(s: int) -> dict[str, Any]:
        held = draw(st.integers(0, 6))
        copied = {"bytes": draw(st.integers(0, held)), "offload_us": draw(times), "reload_us": draw(times)}
        return {
            "device": s % d,
            **{name: draw(times) for name in ("forward_us", "backward_input_us", "backward_weight_us")},
            "activation_bytes": held,
            "backward_weight_bytes": draw(st.integers(0, 7)),
            "workspace_bytes": {kind: draw(st.integers(0, 2)) for kind in "FBW"},
            "offload": copied if draw(st.integers(0, 3)) else None,
        }

    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": draw(st.integers(1, 9)),
            "objective": draw(st.sampled_from(["makespan", "device_span"])),
            "transfer_us": draw(st.integers(0, 3)),
            "devices": [{"memory_bytes": draw(st.none() | st.integers(8, 80))} for _ in range(d)],
            "stages": [stage(s) for s in range(d * v)],
            "copy_channels": {"duplex": draw(st.booleans()), "shared_by": draw(st.sampled_from([[], [[*range(d)]]]))},
            "host_memory_bytes": draw(st.none() | st.integers(0, 60)),
        }
    )


@settings(max_examples=examples(150))
@given(interleaved_problems(), st.sampled_from([gis, gis_h, po_h, po_f]))
def test_verified_or_a_stated_reason(problem: Problem, method: Method) -> None:
    orders = orders_or_reason(problem, method)
    if isinstance(orders, str):
        assert search(r"\d.* Maybe ", orders)
    elif method is not gis or not over_budget(problem, orders):
        build_schedule(problem, orders, 0, "po", 0)


def orders_or_reason(problem: Problem, method: Method) -> Orders | str:
    try:
        return method(problem)
    except MethodError as reason:
        return str(reason)
