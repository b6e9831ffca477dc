"""The verifier: a valid schedule passes, and every rule that is broken is found and named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import uniform
from optpipe.errors import DeadlockError, InputError, OrderError
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule, schedule_text
from optpipe.simulate import simulate
from optpipe.verify import _Verifier, verify
from optpipe.verify.order import find_cycle
from solver.build import build_schedule
from tests.problems import problems
from tests.random_plans import random_orders
from tests.sample import examples

OFFLOAD = {"bytes": 1, "offload_us": 4, "reload_us": 6}


def ops(text: str) -> list[Op]:
    return [Op.parse(name) for name in text.split()]


def example() -> dict[str, Any]:
    """A valid schedule: two devices in a V, shared copy channel, one offload, budgets and a wait."""
    problem = uniform(
        2, 1, v_shape=True, offload=OFFLOAD, budget=5, host_memory_bytes=1, copy_channels={"shared_by": [[0, 1]]}
    )
    orders = Orders(
        [
            DeviceOrders(ops("F0.0 F3.0 B3.0 W3.0 B0.0 W0.0"), ops("O0.0"), ops("R0.0")),
            DeviceOrders(ops("F1.0 F2.0 B2.0 W2.0 B1.0 W1.0")),
        ],
        waits={Op.parse("F3.0"): ops("O0.0")},
    )
    return build_schedule(problem, orders, 10.0, "by hand", 0.1).to_data()


def rules_broken(data: dict[str, Any]) -> set[str]:
    return {violation.rule for violation in verify(Schedule.from_data(data)).violations}


def test_a_valid_schedule_passes() -> None:
    verdict = verify(Schedule.from_data(example()))
    assert verdict.ok
    assert verdict.value_us == verdict.makespan_us == 104
    assert verdict.host_peak_bytes == 1
    assert [facts.peak_bytes for facts in verdict.devices] == [4, 4]


def compute(data: dict[str, Any], device: int, place: int) -> dict[str, Any]:
    return data["devices"][device]["compute"][place]  # type: ignore[no-any-return]


def move(op: dict[str, Any], by_us: float) -> None:
    op["start_us"] += by_us
    op["end_us"] += by_us


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (lambda d: compute(d, 0, 0).update(end_us=9.0), "duration"),
        (lambda d: move(compute(d, 1, 0), -5), "dependency"),
        (lambda d: move(compute(d, 0, 2), -5), "overlap"),
        (lambda d: move(compute(d, 0, 0), -5), "begin"),
        (lambda d: d["devices"][0]["compute"].pop(), "presence"),
        (lambda d: d["devices"][0]["reload"].pop(), "presence"),
        (lambda d: d["devices"][1]["compute"].append(d["devices"][0]["compute"].pop()), "placement"),
        (lambda d: d["devices"][0]["compute"].append(compute(d, 0, 5) | {"start_us": 200.0, "end_us": 210.0}), "once"),
        (lambda d: compute(d, 0, 0)["waits"].append("R0.0"), "wait"),
        (lambda d: compute(d, 0, 1)["waits"].append("O1.0"), "wait"),
        (lambda d: compute(d, 0, 4)["waits"].append("W3.0"), "wait"),
        (lambda d: d["problem"]["devices"][0].update(memory_bytes=3), "budget"),
        (lambda d: d["problem"]["devices"][0].update(memory_bytes=3), "budget-any-timing"),
        (lambda d: d["problem"].update(host_memory_bytes=0), "host-budget"),
        (lambda d: d["problem"]["stages"][0].update(offload=None), "offload"),
    ],
)
def test_finds_what_is_broken(edit: Callable[[dict[str, Any]], Any], rule: str) -> None:
    data = example()
    edit(data)
    assert rule in rules_broken(data)


@pytest.mark.parametrize(
    ("where", "edit"),
    [
        ("value_us", lambda d: d.update(value_us=123.0, gap=113 / 123)),
        ("bound_us", lambda d: d.update(bound_us=105.0, gap=-1 / 104)),
        ("gap", lambda d: d.update(gap=0.5)),
        ("status", lambda d: d.update(status="optimal")),
        ("objective", lambda d: d.update(objective="device_span")),
        ("devices[1].peak_bytes", lambda d: d["devices"][1].update(peak_bytes=3)),
        ("devices[1].peak_bytes_any_timing", lambda d: d["devices"][1].update(peak_bytes_any_timing=3)),
        ("devices[1].busy_us", lambda d: d["devices"][1].update(busy_us=1.0)),
        ("devices[1].bubble", lambda d: d["devices"][1].update(bubble=0.1)),
    ],
)
def test_a_false_claim_is_the_one_that_is_found(where: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    data = example()
    edit(data)
    found = verify(Schedule.from_data(data)).violations
    assert [(violation.rule, violation.where) for violation in found] == [("claim", where)]


def test_a_stage_without_a_backward_has_f_alone() -> None:
    """Which holds its activation, and the workspace of its F, while it runs, whatever the timing."""
    problem = uniform(2, 3, offload=OFFLOAD)
    work = problem.stages[0].workspace_bytes.replaced(F=3)
    frozen, trained = (stage.replaced(workspace_bytes=work) for stage in problem.stages)
    problem = problem.replaced(stages=[frozen.replaced(backward="none"), trained])
    orders = Orders([DeviceOrders(ops("F0.0 F0.1 F0.2")), DeviceOrders(ops("F1.0 BW1.0 F1.1 BW1.1 F1.2 BW1.2"))])
    data = build_schedule(problem, orders, 0.0, "by hand", 0.0).to_data()
    verdict = verify(Schedule.from_data(data))
    assert verdict.ok
    assert [d.peak_bytes_any_timing for d in verdict.devices] == [frozen.activation_bytes + 3] * 2
    for kind, stream in (("B", "compute"), ("W", "compute"), ("BW", "compute"), ("O", "offload"), ("R", "reload")):
        wrong = copy.deepcopy(data)
        op = {"op": kind, "stage": 0, "microbatch": 1, "start_us": 90.0, "end_us": 90.0, "waits": []}
        wrong["devices"][0][stream].append(op)
        details = [found.detail for found in verify(Schedule.from_data(wrong)).violations if found.where == "0.1"]
        assert details[0] == f"needs F alone; {', '.join(sorted(['F', kind]))} found."


def test_finds_overlap_on_a_shared_channel() -> None:
    data = example()
    second = {"op": "O", "stage": 1, "microbatch": 0, "start_us": 22.0, "end_us": 26.0, "waits": []}
    data["devices"][0]["offload"][0].update(start_us=21.0, end_us=25.0)
    data["devices"][1]["offload"].append(second)
    data["devices"][1]["reload"].append(second | {"op": "R", "start_us": 60.0, "end_us": 66.0})
    assert "channel" in rules_broken(data)
    data["problem"]["copy_channels"] = {"shared_by": []}
    assert "channel" not in rules_broken(data)


def test_finds_half_duplex_overlap() -> None:
    data = example()
    data["devices"][0]["offload"][0].update(start_us=10.0, end_us=14.0)
    data["devices"][0]["reload"][0].update(start_us=14.0, end_us=20.0)
    assert "channel" not in rules_broken(data)
    data["problem"]["copy_channels"] = {"duplex": False}
    data["devices"][0]["reload"][0].update(start_us=13.0, end_us=19.0)
    assert "channel" in rules_broken(data)


def test_a_fused_backward_keeps_its_place_among_the_split_ones() -> None:
    problem = uniform(1, 2)
    fine = [DeviceOrders(ops("F0.0 F0.1 BW0.0 B0.1 W0.1"))]
    data = build_schedule(problem, Orders(fine), 0.0, "by hand", 0.0).to_data()
    compute = data["devices"][0]["compute"]
    for place, (kind, start_us, length_us) in enumerate((("B0.1", 20, 10), ("W0.1", 30, 10), ("BW0.0", 40, 20)), 2):
        op = Op.parse(kind)
        compute[place] |= {"op": op.kind, "microbatch": op.microbatch, "start_us": start_us}
        compute[place] |= {"end_us": start_us + length_us}
    assert rules_broken(data) == {"microbatch-order"}
    with pytest.raises(OrderError, match=r"BW0\.0 comes before B0\.1|B0\.1.*BW0\.0"):
        simulate(problem, Orders([DeviceOrders(ops("F0.0 F0.1 B0.1 W0.1 BW0.0"))]))


def test_a_fused_backward_may_come_before_the_weight_pass_of_an_earlier_microbatch() -> None:
    """BW counts as B in the order of microbatches, and not as W."""
    orders = Orders.of_compute([ops("F0.0 F0.1 B0.0 BW0.1 W0.0")])
    schedule = build_schedule(uniform(1, 2), orders, 0.0, "by hand", 0.0)
    assert rules_broken(schedule.to_data()) == set()
    assert schedule.value_us == 60
    assert schedule.orders.devices[0].compute == orders.devices[0].compute


def test_finds_microbatches_out_of_order() -> None:
    problem = uniform(1, 2)
    data = build_schedule(
        problem, Orders.of_compute([ops("F0.0 F0.1 B0.0 B0.1 W0.0 W0.1")]), 1.0, "by hand", 0
    ).to_data()
    first, second = data["devices"][0]["compute"][4:]
    first["microbatch"], second["microbatch"] = 1, 0
    assert "microbatch-order" in rules_broken(data)


def test_finds_waits_that_deadlock() -> None:
    """Ops without length can keep every time and still wait for one another."""
    data = uniform(1, 1).to_data()
    data["stages"][0] |= {"offload": {"bytes": 1, "offload_us": 0, "reload_us": 0}}
    data["stages"][0] |= {"forward_us": 0, "backward_input_us": 0, "backward_weight_us": 0}
    orders = Orders([DeviceOrders(ops("F0.0 B0.0 W0.0"), ops("O0.0"), ops("R0.0"))])
    schedule = build_schedule(Problem.from_data(data), orders, 0.0, "by hand", 0).to_data()
    assert rules_broken(schedule) == set()
    schedule["devices"][0]["offload"][0]["waits"] = ["B0.0"]
    assert rules_broken(schedule) == {"deadlock"}


def test_orders_that_no_executor_could_begin_are_found_at_equal_times() -> None:
    """W before its B on the stream: all three ops share an instant, so no time tells."""
    data = uniform(1, 1).to_data()
    data["stages"][0] |= {"backward_input_us": 0, "backward_weight_us": 0}
    schedule = build_schedule(
        Problem.from_data(data), Orders.of_compute([ops("F0.0 B0.0 W0.0")]), 0.0, "by hand", 0
    ).to_data()
    stream = schedule["devices"][0]["compute"]
    stream[1], stream[2] = stream[2], stream[1]
    [violation] = verify(Schedule.from_data(schedule)).violations
    assert violation.rule == "deadlock"
    assert violation.detail.startswith("waits for itself: ")


@settings(max_examples=examples(60))
@given(st.data())
def test_without_any_length_what_the_simulator_cannot_run_is_found(data: st.DataObject) -> None:
    """Two devices that share a channel hand over at one instant: only orders and waits say who goes first."""
    problem = uniform(2, 2, transfer_us=0, offload={"bytes": 1, "offload_us": 0, "reload_us": 0}).to_data()
    for stage in problem["stages"]:
        stage |= dict.fromkeys(("forward_us", "backward_input_us", "backward_weight_us"), 0)
    kinds = [ops(f"F{s}.0 F{s}.1 B{s}.0 B{s}.1 W{s}.0 W{s}.1") for s in range(2)]
    copies = DeviceOrders(kinds[0], ops("O0.0 O0.1"), ops("R0.0 R0.1"))
    schedule = build_schedule(
        Problem.from_data(problem), Orders([copies, DeviceOrders(kinds[1])]), 0.0, "by hand", 0
    ).to_data()
    for device in schedule["devices"]:
        for place in data.draw(st.lists(st.integers(0, 4), max_size=3)):  # of neighbours that change places
            device["compute"][place : place + 2] = device["compute"][place : place + 2][::-1]
    schedule["devices"][0]["offload"][1]["waits"] = data.draw(st.sampled_from([[], ["B0.0"], ["R0.0"], ["B0.1"]]))
    loaded = Schedule.from_data(schedule)
    try:
        simulate(loaded.problem, loaded.orders)
        runs = True
    except (DeadlockError, OrderError):
        runs = False
    assert runs != bool(rules_broken(schedule) & {"deadlock", "microbatch-order"})


def test_a_wait_for_a_microbatch_that_is_not_there_is_not_taken_for_another() -> None:
    problem = uniform(1, 2, offload=OFFLOAD, v_shape=True)
    orders = Orders(
        [DeviceOrders(ops("F0.0 F0.1 F1.0 F1.1 B1.0 W1.0 B1.1 W1.1 B0.0 W0.0 B0.1 W0.1"), ops("O0.0"), ops("R0.0"))]
    )
    data = build_schedule(problem, orders, 0.0, "by hand", 0).to_data()
    compute(data, 0, 0)["waits"] = ["F0.2"]  # F1.0, if microbatches were counted on into the next stage
    [violation] = verify(Schedule.from_data(data)).violations
    assert str(violation) == "F0.0 at 0 µs: waits for F0.2, which is not in the schedule. [wait]"


def test_channel_orders_of_transfers_without_length_follow_their_waits() -> None:
    """Both wait for an end at the same instant; by time and name O0.1 would come first on the half-duplex channel."""
    data = uniform(1, 2, host_memory_bytes=1, copy_channels={"duplex": False}).to_data()
    data["stages"][0]["offload"] = {"bytes": 1, "offload_us": 0, "reload_us": 0}
    device = DeviceOrders(ops("F0.0 F0.1 B0.0 W0.0 B0.1 W0.1"), ops("O0.0 O0.1"), ops("R0.0 R0.1"))
    waits = {Op.parse("R0.0"): ops("F0.1"), Op.parse("O0.1"): ops("R0.0")}
    orders = Orders([device], waits, [ops("O0.0 R0.0 O0.1 R0.1")])
    problem = Problem.from_data(data)
    schedule = build_schedule(problem, orders, 0.0, "by hand", 0.0)
    assert simulate(problem, schedule.orders).value_us == schedule.value_us
    assert schedule.orders.channels == orders.channels


def test_a_claim_of_many_microbatches_costs_no_more_than_the_ops_that_are_there() -> None:
    """A table of a million microbatches on every stage is never made."""
    data = example()
    data["problem"]["microbatches"] = 10**6
    violations = verify(Schedule.from_data(data)).violations
    assert [(v.rule, v.where) for v in violations] == [("presence", "0.1")]
    assert "3999995 more are missing" in violations[0].detail


def squeezed(schedule: Schedule, share: float) -> Schedule:
    """The schedule with each op of its first device too early and too short by a share of the whole."""
    data = schedule.to_data()
    short_us = share * schedule.value_us
    stream = data["devices"][0]["compute"]
    for place, op in enumerate(stream):
        length_us = op["end_us"] - op["start_us"]
        op["start_us"] -= 2 * place * short_us
        op["end_us"] = op["start_us"] + length_us - short_us
    value_us = stream[-1]["end_us"] - stream[0]["start_us"]
    data |= {"status": "optimal", "value_us": value_us, "bound_us": value_us, "gap": 0.0}
    data["devices"][0] |= {"bubble": 1 - data["devices"][0]["busy_us"] / value_us}
    return Schedule.from_data(data)


def back_to_back(objective: str) -> Schedule:
    """One device that always works, 6,000 ops of 10 us."""
    names = " ".join(f"F0.{i} B0.{i} W0.{i}" for i in range(2000))
    return build_schedule(uniform(1, 2000, objective=objective), Orders.of_compute([ops(names)]), 0.0, "by hand", 0.0)


@pytest.mark.parametrize("objective", ["makespan", "device_span"])
def test_errors_that_are_small_for_each_op_do_not_add_up(objective: str) -> None:
    schedule = squeezed(back_to_back(objective), 0.9e-9)
    assert schedule.value_us < 60_000 * (1 - 1e-6)
    found = {violation.where: violation for violation in verify(schedule).violations}
    assert found["value_us"].rule == "claim"
    assert "these orders take 60000.0" in found["value_us"].detail
    mild = verify(squeezed(back_to_back(objective), 0.4e-13))
    assert "value_us" not in {violation.where for violation in mild.violations}


def test_times_far_from_0_are_not_judged_more_mildly() -> None:
    """The tolerance is a share of the schedule's length, wherever it begins."""
    data = example()
    for device in data["devices"]:
        for stream in ("compute", "offload", "reload"):
            for op in device[stream]:
                move(op, 1e9)
    assert rules_broken(data) == set()
    move(compute(data, 0, 1), -0.5)
    assert {"dependency"} <= rules_broken(data)


@settings(max_examples=examples(100))
@given(problems(), st.integers(0, 10**6))
def test_exact_times_are_those_of_the_simulator(problem: Problem, seed: int) -> None:
    """The least value that the verifier adds up for itself, if it has to."""
    free = Problem.from_data(
        problem.to_data() | {"devices": [{"memory_bytes": None}] * len(problem.devices), "host_memory_bytes": None}
    )
    schedule = build_schedule(free, random_orders(free, Random(seed)), 0.0, "random", 0)
    judge = _Verifier(schedule)
    assert judge._exact_value_us(schedule.value_us * (1 + 1e-9)) == pytest.approx(schedule.value_us, rel=1e-9)
    if schedule.value_us:
        assert judge._exact_value_us(schedule.value_us * (1 - 1e-6)) > schedule.value_us * (1 - 1e-6)


@settings(max_examples=examples(150))
@given(problems(), st.integers(0, 10**6))
def test_agrees_with_the_simulator_on_random_orders(problem: Problem, seed: int) -> None:
    """Two implementations, one set of rules: simulated orders break nothing once the budgets are lifted."""
    free = Problem.from_data(
        problem.to_data() | {"devices": [{"memory_bytes": None}] * len(problem.devices), "host_memory_bytes": None}
    )
    schedule = build_schedule(free, random_orders(free, Random(seed)), 0.0, "random", 0)
    assert Schedule.from_json(schedule_text(schedule)) == schedule


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["devices"].pop(), "devices has 1 entries but the problem 2"),
        (lambda d: compute(d, 0, 0).update(stage=9), "devices[0].compute[0].stage is 9 of 4 stages"),
        (lambda d: compute(d, 0, 0).update(microbatch=1), "devices[0].compute[0].microbatch is 1 of 1"),
        (lambda d: compute(d, 0, 0).update(op="O"), "devices[0].compute[0].op is O, which belongs to"),
        (lambda d: compute(d, 0, 0).update(waits=["Q1"]), "devices[0].compute[0].waits[0] is wrong: 'Q1' is not"),
        (
            lambda d: compute(d, 0, 0).update(strat_us=0),
            "devices[0].compute[0].strat_us is not a field. Maybe you meant",
        ),
        (lambda d: d["problem"]["stages"][0].update(forward_us=-1), "problem.stages[0].forward_us is -1"),
    ],
)
def test_a_document_that_is_no_schedule_is_refused(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    data = example()
    edit(data)
    with pytest.raises(InputError) as caught:
        Schedule.from_data(data)
    assert message in str(caught.value)


PLACES = st.integers(0, 6)


@settings(deadline=None)
@given(st.sets(st.tuples(PLACES, PLACES)), st.lists(st.sampled_from([0.0, 0.1, 0.3, 5.0]), min_size=7, max_size=7))
def test_finds_one_where_there_is_one(edges: set[tuple[int, int]], starts: list[float]) -> None:
    op, before = np.array(sorted(edges), np.int64).reshape(-1, 2).T
    cycle = find_cycle(op, before, np.array(starts))
    if nx.is_directed_acyclic_graph(nx.DiGraph(edges)):
        assert cycle is None
    else:
        assert cycle
        assert {*zip(cycle, [cycle[-1], *cycle], strict=False)} <= edges
