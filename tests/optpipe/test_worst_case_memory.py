"""The any-timing peak against brute force, a minimum cut, and executions with random durations."""

from __future__ import annotations

from functools import cache
from random import Random

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import WHOLE, uniform
from optpipe.costs import device_effect
from optpipe.errors import DeadlockError
from optpipe.memory import derive_waits
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.worst_case_memory import Streams, Waits, worst_case_peak_bytes
from solver.published.ada_offload import in_flight_orders
from solver.published.transfers import TransferPlanner, TransferRequest
from tests.problems import problems
from tests.random_plans import execute, peak_bytes, planned_durations, random_orders
from tests.random_timings import random_peaks_bytes
from tests.sample import examples

SEEDS = st.integers(0, 10**6)
Event = tuple[Op, int]


def streams_of(device: DeviceOrders) -> Streams:
    return device.compute, device.offload, device.reload


def event_graph(problem: Problem, streams: Streams, waits: Waits) -> nx.DiGraph:
    """Events (op, 0: start, 1: end) with their weights, and an edge from each event to every one that precedes it."""
    graph = nx.DiGraph()
    there = {op for ops in streams for op in ops}
    rules = {"B": ("F", "R"), "BW": ("F", "R"), "W": ("B",), "O": ("F",), "R": ("O",)}
    for ops in streams:
        for before, op in zip([None, *ops], ops, strict=False):
            effect = device_effect(problem.stages[op.stage], op.kind)
            graph.add_node((op, 0), weight=effect.at_start)
            graph.add_node((op, 1), weight=effect.at_end)
            graph.add_edge((op, 1), (op, 0))
            if before:
                graph.add_edge((op, 0), (before, 1))
            named = [Op(kind, op.stage, op.microbatch) for kind in rules.get(op.kind, ())]
            for other in [*named, *waits.get(op, ())]:
                if other in there:
                    graph.add_edge((op, 0), (other, 1))
    return graph


def peak_by_minimum_cut(graph: nx.DiGraph) -> int:
    """Maximum closure: weights above 0 minus a minimum cut (Picard 1976)."""
    network = nx.DiGraph()
    for node, weight in graph.nodes(data="weight"):
        if weight > 0:
            network.add_edge("source", node, capacity=weight)
        elif weight < 0:
            network.add_edge(node, "sink", capacity=-weight)
    network.add_edges_from(graph.edges)  # no capacity: no limit
    network.add_nodes_from(["source", "sink"])
    gain = sum(weight for _, weight in graph.nodes(data="weight") if weight > 0)
    return gain - int(nx.minimum_cut_value(network, "source", "sink"))


def peak_by_brute_force(graph: nx.DiGraph) -> int:
    """The largest weight over all closed sets, by walking through every one."""
    weight = dict(graph.nodes(data="weight"))
    before = {node: frozenset(graph.successors(node)) for node in graph}

    @cache
    def best(done: frozenset[Event]) -> int:
        now = sum(weight[node] for node in done)
        steps = [node for node in graph if node not in done and before[node] <= done]
        return max([now, *(best(done | {node}) for node in steps)])

    return best(frozenset())


@settings(max_examples=examples(200))
@given(problems(), SEEDS, st.booleans())
def test_equals_a_minimum_cut(problem: Problem, seed: int, with_waits: bool) -> None:
    orders = random_orders(problem, Random(seed))
    waits = orders.waits if with_waits else {}
    for device in orders.devices:
        graph = event_graph(problem, streams_of(device), waits)
        assert worst_case_peak_bytes(problem, streams_of(device), waits) == peak_by_minimum_cut(graph)


@settings(max_examples=examples(60))
@given(problems(max_devices=1, max_stages=2, max_microbatches=2), SEEDS)
def test_equals_brute_force(problem: Problem, seed: int) -> None:
    orders = random_orders(problem, Random(seed))
    for waits in ({}, orders.waits):
        graph = event_graph(problem, streams_of(orders.devices[0]), waits)
        assert worst_case_peak_bytes(problem, streams_of(orders.devices[0]), waits) == peak_by_brute_force(graph)


@settings(max_examples=examples(100))
@given(problems(), SEEDS)
def test_no_random_timing_exceeds_it(problem: Problem, seed: int) -> None:
    rng = Random(seed)
    orders = random_orders(problem, rng)
    limits = [worst_case_peak_bytes(problem, streams_of(device), orders.waits) for device in orders.devices]
    for _ in range(10):
        durations = {op: rng.choice([0.0, 0.01, 1.0, 100.0]) * rng.random() for op in orders.ops()}
        executed = execute(problem, orders, durations)
        for d, limit in enumerate(limits):
            assert peak_bytes(problem, executed, d) <= limit


@pytest.fixture(scope="module")
def large() -> tuple[Problem, Orders]:
    """16 devices, 128 microbatches, most of whose activations leave within a quarter of the memory of 1F1B."""
    problem = uniform(16, 128, budget=8, offload=WHOLE)
    compute = [device.compute for device in in_flight_orders(problem, 16, 0).devices]
    leaving = {(s, i) for s in range(15) for i in range(128)}
    orders = TransferPlanner(problem, compute).plan(TransferRequest(leaving, 3.0), [8] * 16)
    assert orders is not None
    assert sum(len(device.offload) for device in orders.devices) > 1000
    return problem, orders


@pytest.mark.parametrize("with_waits", [True, False])
def test_no_random_timing_exceeds_it_on_a_large_schedule(large: tuple[Problem, Orders], with_waits: bool) -> None:
    """And some timing reaches it on most devices, so it is not only safe but exact."""
    problem, orders = large
    chosen = orders if with_waits else Orders(orders.devices, {}, orders.channels)
    limits = np.array([worst_case_peak_bytes(problem, streams_of(device), chosen.waits) for device in chosen.devices])
    peaks = random_peaks_bytes(problem, chosen, timings=20, seed=0)
    assert (peaks <= limits).all()
    if with_waits:
        assert (limits <= 16).all()
        assert (peaks.max(axis=0) == limits).mean() > 0.5
    else:
        assert (limits > 16).any()


def test_equals_a_minimum_cut_on_a_device_of_a_large_schedule(large: tuple[Problem, Orders]) -> None:
    problem, orders = large
    for waits in (orders.waits, {}):
        graph = event_graph(problem, streams_of(orders.devices[3]), waits)
        assert worst_case_peak_bytes(problem, streams_of(orders.devices[3]), waits) == peak_by_minimum_cut(graph)


@settings(max_examples=examples(200))
@given(problems(), SEEDS)
def test_derived_waits_keep_the_planned_peak_at_no_cost(problem: Problem, seed: int) -> None:
    """Research result behind `optpipe.memory`; ops without length or that grow memory at their end are left out."""
    stages = [
        {
            **stage,
            **{key: stage[key] or 1 for key in ("forward_us", "backward_input_us", "backward_weight_us")},
            "backward_weight_bytes": min(stage["backward_weight_bytes"], stage["activation_bytes"]),
        }
        for stage in problem.to_data()["stages"]
    ]
    for stage in stages:
        if stage["offload"]:
            stage["offload"] |= {key: stage["offload"][key] or 1 for key in ("offload_us", "reload_us")}
    problem = Problem.from_data(problem.to_data() | {"stages": stages, "objective": "makespan"})
    orders = random_orders(problem, Random(seed))
    simulation = simulate(problem, orders)
    planned = {op: (float(simulation.start_us[k]), float(simulation.end_us[k])) for op, k in simulation.index.items()}
    waits = derive_waits(problem, orders.devices, planned, tolerance=1e-9)
    again = simulate(problem, Orders(orders.devices, waits, orders.channels))
    assert again.value_us <= simulation.value_us + 1e-9
    executed = execute(problem, orders, planned_durations(problem, orders))
    for d, device in enumerate(orders.devices):
        at_any_time = worst_case_peak_bytes(problem, streams_of(device), waits)
        assert at_any_time <= max(peak_bytes(problem, executed, d), simulation.device_memory(d).peak_bytes)


def test_without_waits_a_slow_offload_exceeds_the_plan() -> None:
    problem = uniform(1, 2).to_data()
    problem["stages"][0]["offload"] = {"bytes": 2, "offload_us": 1, "reload_us": 1}
    device = DeviceOrders(
        [Op.parse(name) for name in ["F0.0", "F0.1", "B0.0", "W0.0", "B0.1", "W0.1"]],
        [Op("O", 0, 0)],
        [Op("R", 0, 0)],
    )
    loaded = Problem.from_data(problem)
    assert worst_case_peak_bytes(loaded, streams_of(device), {}) == 4
    waits = {Op("F", 0, 1): [Op("O", 0, 0)]}
    assert worst_case_peak_bytes(loaded, streams_of(device), waits) == 4  # R still comes back beside F0.1
    waits = {Op("F", 0, 1): [Op("O", 0, 0)], Op("R", 0, 0): [Op("W", 0, 1)]}
    with pytest.raises(DeadlockError):
        worst_case_peak_bytes(loaded, streams_of(device), waits)
