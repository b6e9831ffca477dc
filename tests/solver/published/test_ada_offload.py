"""AdaOffload: within the budgets on every instance with offload, never a deadlock, and a reason where it fails."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import HALF, REFERENCE, WHOLE, instance, uniform
from optpipe.errors import MethodError
from optpipe.ops import Op
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.build import build_schedule, within_budgets
from solver.published.ada_offload import ada_offload, in_flight_orders
from solver.serial import known_budgets_bytes, serial_orders
from tests.placed_problems import placed_problems
from tests.problems import problems
from tests.random_timings import exceeded, random_peaks_bytes
from tests.recomputing import random_pipeline
from tests.sample import examples, some

WITH_OFFLOAD = sorted(name for name in REFERENCE if name.startswith(("d-", "po-")))


@pytest.mark.parametrize("name", some(WITH_OFFLOAD, 5))
def test_every_instance_with_offload(name: str) -> None:
    problem = instance(name)
    schedule = build_schedule(problem, ada_offload(problem), 0.0, "ada-offload", 0.0)
    assert schedule.value_us < sum(problem.work_us)  # better than one device after the other


@pytest.mark.parametrize(
    ("name", "at_most_us"),
    [
        ("d-p4-m8-o1-mo1-b1o2-linear-make", 51000),
        ("d-p8-m16-o1-mo1-b1o2-linear-make", 167000),
        ("d-p8-m16-o1-mo1-b1o4-linear-make", 227000),
        ("d-p16-m32-o1-mo1-b1o4-linear-make", 839000),
        ("d-p8-m16-o1-mo1-b1o2-vshape-make", 61500),
    ],
)
def test_beats_every_public_scheduler(name: str, at_most_us: float) -> None:
    assert REFERENCE[name]["best_public"]["value_us"] == at_most_us
    problem = instance(name)
    assert simulate(problem, ada_offload(problem)).value_us < at_most_us / 1.1


def test_offloads_nothing_where_the_budget_is_ample() -> None:
    orders = ada_offload(uniform(4, 8, offload=WHOLE))
    assert not any(device.offload for device in orders.devices)


def test_says_which_budgets_would_do() -> None:
    with pytest.raises(MethodError, match=r"Maybe raise devices\[\].memory_bytes to \[4, 4\]"):
        ada_offload(uniform(2, 2, v_shape=True, budget=3))


@settings(max_examples=examples(300))
@given(placed_problems() | problems(max_microbatches=5), st.integers(0, 10**6))
def test_valid_wherever_the_floor_is_and_under_any_timing(problem: Problem, seed: int) -> None:
    """Where there is no schedule, the floor has none either, and the budgets that the reason names are enough."""
    floor = serial_orders(problem)
    try:
        orders = ada_offload(problem)
    except MethodError:
        assert floor is None or not within_budgets(problem, floor, simulate(problem, floor))
        known = [{"memory_bytes": budget} for budget in known_budgets_bytes(problem)]
        orders = ada_offload(Problem.from_data(problem.to_data() | {"devices": known}))
        assert orders.devices
        return
    build_schedule(problem, orders, 0.0, "ada-offload", 0.0)
    assert floor is None or simulate(problem, orders).value_us <= simulate(problem, floor).value_us + 1e-9
    assert not exceeded(problem, random_peaks_bytes(problem, orders, 100, seed))


@settings(max_examples=examples(100))
@given(problems(max_microbatches=5), st.integers(1, 6), st.integers(0, 3))
def test_any_number_in_flight_runs(problem: Problem, in_flight: int, late_weights: int) -> None:
    orders = in_flight_orders(problem, in_flight, late_weights)
    assert len(simulate(problem, orders).ops) == 3 * len(problem.stages) * problem.microbatches


def test_a_refusal_names_each_limit_that_may_be_too_small() -> None:
    problem = uniform(2, 2, budget=1, offload=HALF, host_memory_bytes=3)
    limits = "device 0 has 1: 1 too few; device 1 has 1: 1 too few; the host has 3 for what leaves"
    with pytest.raises(MethodError, match=rf"{limits}.* Maybe raise devices\[\]\.memory_bytes to \[2, 2\]"):
        ada_offload(problem)


def test_one_f_one_b_comes_out() -> None:
    """Two devices, two in flight: device 0 starts two F, then B and F take turns."""
    orders = in_flight_orders(uniform(2, 4, transfer_us=0), 2, 0)
    names = [str(op) for op in orders.devices[0].compute if op.kind != "W"]
    assert names == ["F0.0", "F0.1", "B0.0", "F0.2", "B0.1", "F0.3", "B0.2", "B0.3"]


def test_one_in_flight_is_one_after_the_other() -> None:
    problem = uniform(3, 2, transfer_us=1)
    orders = in_flight_orders(problem, 1, 0)
    assert [str(op) for op in orders.devices[0].compute] == ["F0.0", "B0.0", "W0.0", "F0.1", "B0.1", "W0.1"]
    assert simulate(problem, orders).value_us == 2 * (6 * 10 + 4) + 2 * 10


@settings(max_examples=examples(150))
@given(problems(max_microbatches=6), st.integers(1, 7), st.integers(0, 3))
def test_both_numbers_hold(problem: Problem, in_flight: int, late_weights: int) -> None:
    orders = in_flight_orders(problem, in_flight, late_weights)
    assert len(simulate(problem, orders).ops) == 3 * len(problem.stages) * problem.microbatches
    first = list(orders.devices[problem.stages[0].device].compute)
    for i in range(in_flight, problem.microbatches):
        assert first.index(Op("B", 0, i - in_flight)) < first.index(Op("F", 0, i))
    for device in orders.devices:
        pending = 0
        for op in device.compute:
            assert op.kind == "W" or pending <= late_weights
            pending += {"F": 0, "B": 1, "W": -1}[op.kind]


@pytest.mark.parametrize("first", some(range(0, 60, 20)))
def test_with_modes_it_is_valid_wherever_the_floor_is(first: int) -> None:
    """No worse than the floor and than what keeps or offloads everything, under any timing; a reason where it fails."""
    better = 0
    for seed in range(first, first + 20):
        problem = random_pipeline(Random(seed))
        if not all(stage.split_backward for stage in problem.stages):
            continue
        floor = serial_orders(problem)
        assert floor is not None
        schedule = build_schedule(problem, ada_offload(problem), 0.0, "ada-offload", 0.0)
        assert schedule.value_us <= simulate(problem, floor).value_us
        data = problem.to_data()
        data["devices"] = [{"memory_bytes": device["memory_bytes"] // 8} for device in data["devices"]]
        small = Problem.from_data(data)
        if serial_orders(small) is None:
            with pytest.raises(MethodError, match=r"Maybe raise devices\[\]\.memory_bytes"):
                ada_offload(small)
        data = problem.to_data()
        for stage in data["stages"]:
            stage["modes"] = []
        plain = Problem.from_data(data)
        if serial_orders(plain) is None:
            better += 1
        else:
            plain_us = simulate(plain, ada_offload(plain)).value_us
            assert schedule.value_us <= plain_us
            better += schedule.value_us < plain_us
    assert better
