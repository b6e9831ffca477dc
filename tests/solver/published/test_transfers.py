"""Transfers for compute orders: only what is wished for leaves, and memory is safe under any timing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from instances import HALF, WHOLE, uniform
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import Simulation, simulate
from solver.build import over_budget, within_budgets
from solver.published.ada_offload import in_flight_orders
from solver.published.transfers import Activation, TransferPlanner, TransferRequest
from tests.problems import problems
from tests.sample import examples


def compute_of(problem: Problem, in_flight: int, late_weights: int = 0) -> list[Sequence[Op]]:
    return [device.compute for device in in_flight_orders(problem, in_flight, late_weights).devices]


def offloadable(problem: Problem) -> list[Activation]:
    return [(s, i) for s, stage in enumerate(problem.stages) if stage.offload for i in range(problem.microbatches)]


def left(orders: Orders) -> list[list[Activation]]:
    """For each device what leaves, in that order."""
    return [[(op.stage, op.microbatch) for op in device.offload] for device in orders.devices]


def life_us(simulation: Simulation, stage: int, microbatch: int) -> float:
    """From the end of an F to the start of its B."""
    forward, backward = (simulation.index[Op(kind, stage, microbatch)] for kind in "FB")
    return float(simulation.start_us[backward] - simulation.end_us[forward])


def round_trip_us(problem: Problem, stage: int) -> float:
    return problem.stages[stage].duration_us("O") + problem.stages[stage].duration_us("R")


def played(problem: Problem, compute: list[Sequence[Op]], wish: TransferRequest) -> Orders | None:
    return TransferPlanner(problem, compute).plan(wish, [device.memory_bytes for device in problem.devices])


def test_without_a_wish_compute_orders_stay_as_they_are() -> None:
    problem = uniform(4, 8, offload=HALF)
    compute = compute_of(problem, 4)
    assert played(problem, compute, TransferRequest(set(), 1.0)) == replace(Orders.of_compute(compute), channels=[])


def test_stuck_where_an_op_has_no_room_and_nothing_leaves() -> None:
    problem = uniform(4, 8, offload=WHOLE, budget=2)
    compute = compute_of(problem, 4)
    assert played(problem, compute, TransferRequest(set(), 1.0)) is None
    assert played(problem, compute, TransferRequest(set(offloadable(problem)), 1.0)) is not None


def test_a_forward_waits_for_the_offload_that_makes_room() -> None:
    """Room for two activations: from the third F on each waits for a copy."""
    problem = uniform(4, 8, offload=WHOLE, budget=4)
    orders = played(problem, compute_of(problem, 4), TransferRequest(set(offloadable(problem)), 1.0))
    assert orders is not None
    assert orders.waits[Op("F", 0, 2)] == [Op("O", 0, 0)]
    assert Op("F", 0, 1) not in orders.waits


Chance = tuple[Random, float]
wishes = st.tuples(st.randoms(use_true_random=False), st.sampled_from([0.0, 1.0, 1.5, 3.0]))


@settings(max_examples=examples(150))
@given(problems(max_microbatches=6), st.integers(1, 6), st.integers(0, 3), wishes)
def test_keeps_wish_and_budgets_under_any_timing(problem: Problem, in_flight: int, late: int, wish: Chance) -> None:
    rng, lead = wish
    leaving = {activation for activation in offloadable(problem) if rng.random() < 0.7}
    compute = compute_of(problem, in_flight, late)
    undisturbed = simulate(problem, Orders.of_compute(compute))
    orders = played(problem, compute, TransferRequest(leaving, lead))
    if orders is None:
        return
    moved = {activation for each in left(orders) for activation in each}
    assert moved <= leaving
    assert all(life_us(undisturbed, *activation) >= round_trip_us(problem, activation[0]) for activation in moved)
    assert over_budget(problem, orders) == []
    assert within_budgets(problem, orders, simulate(problem, orders))


@settings(max_examples=examples(50))
@given(problems(max_microbatches=6), st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=2, max_size=4))
def test_a_planner_forgets_what_it_played(problem: Problem, leads: list[float]) -> None:
    compute, budgets = compute_of(problem, 3), [device.memory_bytes for device in problem.devices]
    planner, leaving = TransferPlanner(problem, compute), set(offloadable(problem))
    for lead in leads:
        assert planner.plan(TransferRequest(leaving, lead), budgets) == played(
            problem, compute, TransferRequest(leaving, lead)
        )
