"""The verifier's rules about slices and unequal microbatches: each has a schedule that breaks this rule alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from optpipe.errors import OrderError
from optpipe.ops import DeviceOrders, Orders
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.build import build_schedule
from tests.optpipe.test_verify_modes import Data, judged, op_of
from tests.recomputing import ops
from tests.unequal import times, unequal

SLICES = {"count": 2, "factors": {"forward": [1, 2], "backward_input": [1, 3], "bytes": [1, 1.5], "transfer": [1, 0.5]}}


@cache
def sliced() -> Schedule:
    """Two stages, two microbatches of two slices: stage 0 offloads unit 0; gradients take 5 bytes a slice."""
    offload = {"bytes": 3, "offload_us": 1, "reload_us": 2}
    problem = unequal(2, 2, slices=SLICES, transfer_us=2, offload=offload, slice_gradient_bytes=5)
    orders = Orders(
        [
            DeviceOrders(ops("F0.0 F0.1 F0.2 B0.1 F0.3 W0.1 BW0.0 BW0.3 BW0.2"), ops("O0.0"), ops("R0.0")),
            DeviceOrders(ops("F1.0 F1.1 BW1.1 B1.0 W1.0 F1.2 F1.3 BW1.3 BW1.2")),
        ]
    )
    return build_schedule(problem, orders, 0.0, "by hand", 0.0)


@cache
def reordered() -> Schedule:
    """Three microbatches in the order 2, 0, 1 on one stage, each forward followed by its backward."""
    problem = unequal(1, 3, microbatch_factors=times(1, 2, 3), microbatch_order="free")
    orders = Orders([DeviceOrders(ops("F0.2 BW0.2 F0.0 BW0.0 F0.1 BW0.1"))], microbatch_order=[2, 0, 1])
    return build_schedule(problem, orders, 0.0, "by hand", 0.0)


@pytest.mark.parametrize("schedule", [sliced, reordered])
def test_the_examples_are_valid(schedule: Callable[[], Schedule]) -> None:
    data = schedule().to_data()
    assert judged(data).ok
    assert data == schedule().to_data() | {"bound_us": 0.0}
    assert Schedule.from_data(data).orders.microbatch_order == schedule().microbatch_order


def test_peaks_of_slices() -> None:
    """On stage 0 units take 4 or 6 bytes, and the gradients 5 from B0.1's start to BW0.0's end."""
    data = sliced().to_data()
    assert op_of(data, "F0.1")["end_us"] - op_of(data, "F0.1")["start_us"] == 2
    # When F0.3 runs: F0.2 and F0.3 (4 + 6), what W0.1 needs (ceil(2 x 1.5)), unit 0 (4, or 1 away), the gradients (5).
    assert data["devices"][0]["peak_bytes"] in (4 + 6 + 3 + 1 + 5, 4 + 6 + 3 + 4 + 5)
    # In the worst case unit 0 is back by then.
    assert data["devices"][0]["peak_bytes_any_timing"] == 4 + 6 + 3 + 4 + 5


@cache
def alone() -> Schedule:
    """One stage, two microbatches of two slices, of which both of the first leave and come back."""
    offload = {"bytes": 3, "offload_us": 1, "reload_us": 1}
    problem = unequal(1, 2, slices=SLICES, offload=offload)
    compute = "F0.0 F0.1 F0.2 F0.3 B0.1 B0.0 W0.1 BW0.3 W0.0 BW0.2"
    orders = Orders([DeviceOrders(ops(compute), ops("O0.0 O0.1"), ops("R0.1 R0.0"))])
    return build_schedule(problem, orders, 0.0, "by hand", 0.0)


@pytest.mark.parametrize(
    ("compute", "offload", "reload"),
    [
        ("F0.1 F0.0 F0.2 F0.3 B0.1 B0.0 W0.1 BW0.3 W0.0 BW0.2", "O0.0 O0.1", "R0.1 R0.0"),
        ("F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 W0.1 BW0.3 W0.0 BW0.2", "O0.0 O0.1", "R0.1 R0.0"),
        ("F0.0 F0.1 F0.2 F0.3 B0.1 B0.0 W0.0 BW0.3 W0.1 BW0.2", "O0.0 O0.1", "R0.1 R0.0"),
        ("F0.0 F0.1 F0.2 F0.3 B0.1 BW0.3 B0.0 W0.1 W0.0 BW0.2", "O0.0 O0.1", "R0.1 R0.0"),
        ("F0.0 F0.1 F0.2 F0.3 B0.1 B0.0 W0.1 BW0.2 W0.0 BW0.3", "O0.0 O0.1", "R0.1 R0.0"),
        ("F0.0 F0.1 F0.2 F0.3 B0.1 B0.0 W0.1 BW0.3 W0.0 BW0.2", "O0.1 O0.0", "R0.1 R0.0"),
        ("F0.0 F0.1 F0.2 F0.3 B0.1 B0.0 W0.1 BW0.3 W0.0 BW0.2", "O0.0 O0.1", "R0.0 R0.1"),
    ],
)
def test_slices_run_forward_from_the_first_and_backward_from_the_last(compute: str, offload: str, reload: str) -> None:
    """The same ops in another order, far apart, each stream after the one that it needs."""
    data = alone().to_data()
    assert judged(data).ok
    device = data["devices"][0]
    rows = {
        f"{row['op']}0.{row['microbatch']}": row
        for stream in ("compute", "offload", "reload")
        for row in device[stream]
    }
    now = 0.0
    for names in (compute.split()[:4], offload.split(), reload.split(), compute.split()[4:]):
        for name in names:
            length = rows[name]["end_us"] - rows[name]["start_us"]
            rows[name].update(start_us=now, end_us=now + length, waits=[])
            now += length
    device["compute"] = [rows[name] for name in compute.split()]
    device["offload"], device["reload"] = ([rows[name] for name in names.split()] for names in (offload, reload))
    assert {violation.rule for violation in judged(data).violations} == {"microbatch-order"}


@pytest.mark.parametrize(
    ("edit", "rules"),
    [
        (lambda d: d["problem"]["slices"]["factors"].update(backward_weight=[1, 1.25]), {"duration"}),
        (lambda d: d["problem"]["stages"][1].update(slice_factors={"bytes": [1, 1.5]}), {"duration", "dependency"}),
        (lambda d: d["problem"]["slices"]["factors"].update(transfer=[1, 3]), {"dependency"}),
        (lambda d: d["problem"].update(microbatch_factors=[{}, {"transfer": 9}]), {"dependency"}),
        (lambda d: d.update(microbatch_order=[1, 0]), {"free-order", "microbatch-order"}),
    ],
)  # fmt: skip
def test_each_rule_is_broken_alone(edit: Callable[[Data], Any], rules: set[str]) -> None:
    data = sliced().to_data()
    edit(data)
    assert {violation.rule for violation in judged(data).violations} == rules


@pytest.mark.parametrize(
    ("edit", "rules"),
    [
        (lambda d: d.pop("microbatch_order"), {"microbatch-order"}),
        (lambda d: d.update(microbatch_order=[0, 1, 2]), {"microbatch-order"}),
        (lambda d: d["problem"].update(microbatch_order="given"), {"free-order"}),
        (lambda d: d["problem"]["microbatch_factors"][1].update(time=2.5), {"duration"}),
    ],
)
def test_each_rule_of_the_order_is_broken_alone(edit: Callable[[Data], Any], rules: set[str]) -> None:
    data = reordered().to_data()
    edit(data)
    assert {violation.rule for violation in judged(data).violations} == rules


@pytest.mark.parametrize("field", ["bytes", "slice_gradient_bytes"])
def test_figures_count_the_bytes_of_units(field: str) -> None:
    data = sliced().to_data()
    if field == "bytes":
        data["problem"]["slices"]["factors"]["bytes"] = [1, 1.75]
        data["problem"]["stages"][0]["offload"] = None
        for device in data["devices"]:
            device |= {"offload": [], "reload": []}
    else:
        data["problem"]["stages"][0]["slice_gradient_bytes"] = 6
    found = {violation.where for violation in verify(Schedule.from_data(data)).violations}
    assert "devices[0].peak_bytes_any_timing" in found
    assert ("devices[1].peak_bytes_any_timing" in found) == (field == "bytes")


def test_budgets_hold_to_the_byte() -> None:
    for device in range(2):
        data = sliced().to_data()
        peak = sliced().devices[device].peak_bytes_any_timing
        data["problem"]["devices"][device]["memory_bytes"] = peak
        assert judged(data).ok
        data["problem"]["devices"][device]["memory_bytes"] = peak - 1
        assert "budget-any-timing" in {violation.rule for violation in judged(data).violations}


@pytest.mark.parametrize(
    ("compute", "microbatch_order"),
    [
        ("F0.1 F0.0 BW0.1 BW0.0", None),
        ("F0.0 F0.1 BW0.0 BW0.1", None),
        ("F0.0 F0.1 B0.1 B0.0 W0.0 W0.1", None),
        ("F0.0 F0.1 BW0.1 BW0.0", [1]),
        ("F0.0 F0.1 BW0.1 BW0.0", [0, 0]),
    ],
)
def test_orders_that_break_the_rules_are_not_simulated(compute: str, microbatch_order: list[int] | None) -> None:
    problem = unequal(1, 1, slices=SLICES)
    simulate(problem, Orders([DeviceOrders(ops("F0.0 F0.1 B0.1 B0.0 W0.1 W0.0"))], microbatch_order=[0]))
    with pytest.raises(OrderError):
        simulate(problem, Orders([DeviceOrders(ops(compute))], microbatch_order=microbatch_order))


def test_an_order_that_the_problem_does_not_leave_free_is_refused() -> None:
    orders = reordered().orders
    data = reordered().problem.to_data()
    with pytest.raises(OrderError, match="'given'"):
        simulate(unequal(1, 3, microbatch_factors=data["microbatch_factors"]), orders)
