"""The simulator against hand-made cases, a naive executor, and a linear program."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from instances import uniform
from optpipe.errors import DeadlockError, OrderError
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import Simulation, simulate
from tests.problems import problems
from tests.random_plans import execute, peak_bytes, planned_durations, precedences, random_orders
from tests.sample import examples

SEEDS = st.integers(0, 10**6)


def ops(text: str) -> list[Op]:
    return [Op.parse(name) for name in text.split()]


def times(simulation: Simulation) -> dict[str, tuple[float, float]]:
    ends = zip(simulation.start_us.tolist(), simulation.end_us.tolist(), strict=True)
    return {str(op): pair for op, pair in zip(simulation.ops, ends, strict=True)}


def test_two_stages_by_hand() -> None:
    orders = Orders.of_compute([ops("F0.0 F0.1 B0.0 W0.0 B0.1 W0.1"), ops("F1.0 B1.0 F1.1 B1.1 W1.0 W1.1")])
    simulation = simulate(uniform(2, 2), orders)
    found = times(simulation)
    assert found["F1.0"] == (11, 21)
    assert found["B0.0"] == (32, 42)
    assert found["B1.1"] == (41, 51)
    assert found["B0.1"] == (52, 62)
    assert simulation.makespan_us == 72
    assert simulation.spans_us == [72, 60]
    assert simulation.device_memory(0).peak_bytes == 4


def test_fused_backward_frees_all_at_its_end_and_delays_the_stage_before() -> None:
    simulation = simulate(uniform(2, 1), Orders.of_compute([ops("F0.0 BW0.0"), ops("F1.0 BW1.0")]))
    assert times(simulation)["BW0.0"] == (42, 62)
    memory = simulation.device_memory(1)
    assert (memory.times_us.tolist(), memory.bytes.tolist()) == ([11, 21, 41], [2, 2, 0])


def test_a_fused_backward_counts_as_b_and_not_as_w_in_the_order_of_microbatches() -> None:
    simulation = simulate(uniform(1, 2), Orders.of_compute([ops("F0.0 F0.1 B0.0 BW0.1 W0.0")]))
    assert times(simulation)["W0.0"] == (50, 60)
    for wrong in ("F0.0 F0.1 B0.1 W0.1 BW0.0", "F0.0 F0.1 BW0.1 B0.0 W0.0", "F0.0 F0.1 B0.0 B0.1 W0.1 W0.0"):
        with pytest.raises(OrderError, match="microbatches keep their order within a stage"):
            simulate(uniform(1, 2), Orders.of_compute([ops(wrong)]))


OFFLOAD = {"bytes": 1, "offload_us": 4, "reload_us": 6}


def test_offload_frees_at_its_end_and_takes_at_reload() -> None:
    problem = uniform(1, 1, offload=OFFLOAD)
    data = problem.to_data()
    data["stages"][0]["offload"] = OFFLOAD
    orders = Orders([DeviceOrders(ops("F0.0 B0.0 W0.0"), ops("O0.0"), ops("R0.0"))])
    simulation = simulate(Problem.from_data(data), orders)
    memory = simulation.device_memory(0)
    assert memory.times_us.tolist() == [0, 10, 14, 20, 30, 40]
    assert memory.bytes.tolist() == [2, 2, 2, 2, 1, 0]  # O ends and R starts at 14: both count there
    assert simulation.host_memory().times_us.tolist() == [10, 14, 20]
    assert simulation.host_memory().peak_bytes == 1


def test_waits_and_shared_channels_delay() -> None:
    problem = uniform(2, 1, v_shape=True, offload=OFFLOAD, copy_channels={"duplex": True, "shared_by": [[0, 1]]})
    devices = [
        DeviceOrders(ops("F0.0 F3.0 B3.0 W3.0 B0.0 W0.0"), ops("O0.0"), ops("R0.0")),
        DeviceOrders(ops("F1.0 F2.0 B2.0 W2.0 B1.0 W1.0"), ops("O1.0 O2.0"), ops("R2.0 R1.0")),
    ]
    plain = times(simulate(problem, Orders(devices)))
    assert plain["O1.0"] == (21, 25)
    channels = [ops("O1.0 O2.0 O0.0"), ops("R2.0 R0.0 R1.0")]
    waits = {Op.parse("F2.0"): ops("O1.0")}
    found = times(simulate(problem, Orders(devices, waits, channels)))
    assert found["F2.0"] == (25, 35)
    assert found["O0.0"] == (39, 43)
    assert found["R0.0"] == (45, 51)
    assert found["R1.0"] == (51, 57)


def test_names_the_ops_of_a_deadlock() -> None:
    orders = Orders.of_compute([ops("F0.0 B0.0 F0.1 B0.1 W0.0 W0.1"), ops("F1.0 F1.1 B1.0 B1.1 W1.0 W1.1")])
    with pytest.raises(DeadlockError) as caught:
        simulate(uniform(2, 2), orders)
    assert set(caught.value.cycle) == {"F0.1", "F1.1", "B1.0", "B0.0"}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("F0.0 B0.0", "F1.0 B1.0 W1.0", "W0.0 is missing"),
        ("F0.0 B0.0 W0.0 W0.0", "F1.0 B1.0 W1.0", "W0.0 is there more than once"),
        ("F0.0 B0.0 W0.0 F1.0", "B1.0 W1.0", "F1.0 is on device 0"),
        ("F0.0 BW0.0 W0.0", "F1.0 B1.0 W1.0", "BW0.0 is there together with"),
        ("F0.0 B0.0 W0.0", "F1.0 B1.0 W1.0 F5.0", "F5.0 is not in a problem of 2 stages"),
        ("B0.0 W0.0", "F1.0 B1.0 W1.0", "F0.0 is missing"),
    ],
)
def test_refuses_orders_that_are_none(first: str, second: str, message: str) -> None:
    with pytest.raises(OrderError, match=message):
        simulate(uniform(2, 1), Orders.of_compute([ops(first), ops(second)]))


@pytest.mark.parametrize("absent", ["R0.0", "F0.1", "F9.0"])
def test_refuses_waits_and_channels_of_ops_that_are_not_there(absent: str) -> None:
    devices = [DeviceOrders(ops("F0.0 B0.0 W0.0")), DeviceOrders(ops("F1.0 B1.0 W1.0"))]
    waiting = Orders(devices, waits={Op.parse("F1.0"): ops(absent)})
    sharing = Orders(devices, channels=[ops(f"F0.0 {absent}")])
    for orders in (waiting, sharing):
        with pytest.raises(OrderError, match=f"names {absent}, which is in no stream"):
            simulate(uniform(2, 1), orders)


def test_refuses_orders_for_no_device() -> None:
    with pytest.raises(OrderError, match=r"F0\.0 is missing"):
        simulate(uniform(1, 1), Orders([]))


def test_refuses_microbatches_out_of_order() -> None:
    orders = Orders.of_compute([ops("F0.1 F0.0 B0.0 B0.1 W0.0 W0.1")])
    with pytest.raises(OrderError, match=r"F0.1 comes before F0.0"):
        simulate(uniform(1, 2), orders)


@settings(max_examples=examples(200))
@given(problems(), SEEDS)
def test_equals_a_naive_executor(problem: Problem, seed: int) -> None:
    problem = problem.model_copy(update={"objective": "makespan"})
    orders = random_orders(problem, Random(seed))
    simulation = simulate(problem, orders)
    executed = execute(problem, orders, planned_durations(problem, orders))
    for op, k in simulation.index.items():
        assert (simulation.start_us[k], simulation.end_us[k]) == pytest.approx(executed[op], abs=1e-9)
    for d in range(len(problem.devices)):
        assert simulation.device_memory(d).peak_bytes == peak_bytes(problem, executed, d)


@settings(max_examples=examples(100))
@given(problems(max_devices=4, max_stages=6, max_microbatches=4), SEEDS)
def test_device_span_is_the_least_that_the_orders_allow(problem: Problem, seed: int) -> None:
    problem = problem.model_copy(update={"objective": "device_span"})
    orders = random_orders(problem, Random(seed))
    assert simulate(problem, orders).value_us == pytest.approx(_least_span_by_lp(problem, orders), rel=1e-6, abs=1e-6)


def _least_span_by_lp(problem: Problem, orders: Orders) -> float:
    """The smallest largest span over all start times that keep orders and rules, as a linear program."""
    everything = list(orders.ops())
    column = {op: k for k, op in enumerate(everything)}
    duration = planned_durations(problem, orders)
    span = len(everything)
    rows: list[np.ndarray] = []
    limits: list[float] = []

    def row(entries: dict[int, float], limit: float) -> None:
        rows.append(np.zeros(span + 1))
        for k, value in entries.items():
            rows[-1][k] += value
        limits.append(limit)

    for before, op, delay in precedences(problem, orders):
        row({column[before]: 1.0, column[op]: -1.0}, -duration[before] - delay)
    for device in orders.devices:
        if device.compute:
            first, last = device.compute[0], device.compute[-1]
            row({column[last]: 1.0, column[first]: -1.0, span: -1.0}, -duration[last] if last != first else 0.0)
    objective = np.zeros(span + 1)
    objective[span] = 1.0
    return float(linprog(objective, A_ub=np.array(rows), b_ub=np.array(limits)).fun)
