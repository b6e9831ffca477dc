"""Merged sequences stand for orders: the same times, memory within the level that is counted along them."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from instances import uniform
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.verify import verify
from optpipe.worst_case_memory import worst_case_peak_bytes
from solver.build import build_schedule
from solver.search.annealing.sequence import Merged, merge, orders_from_sequences
from solver.search.annealing.table import Table, build_table
from tests.problems import problems
from tests.random_plans import random_orders
from tests.sample import examples


def levels_bytes(problem: Problem, table: Table, merged: Merged) -> list[int]:
    """The peak of each device counted along its group's sequence."""
    peaks = [0] * len(problem.devices)
    level = [0] * len(problem.devices)
    for g, begin in enumerate(table.first.tolist()):
        for x in merged.ops[begin : begin + int(merged.length[g])].tolist():
            c = x >> table.shift
            d = int(table.classes["device"][c])
            peaks[d] = max(peaks[d], level[d] + int(table.classes["need_bytes"][c]))
            level[d] += int(table.classes["change_bytes"][c])
    return peaks


def with_own_levels(problem: Problem, orders: Orders) -> Problem:
    """The problem with budgets of which orders of it need all, as sequences."""
    table = build_table(problem)
    budgets = [{"memory_bytes": size} for size in levels_bytes(problem, table, merge(table, simulate(problem, orders)))]
    return problem.from_data(problem.to_data() | {"devices": budgets})


def split(orders: Orders) -> set[Op]:
    """The ops of orders, fused backwards as two."""
    return {Op(kind, *op[1:]) for op in orders.ops() for kind in (op.kind if op.kind == "BW" else (op.kind,))}


@given(problems(), st.randoms(use_true_random=False))
@settings(max_examples=examples(150))
def test_sequences_of_any_orders_are_orders_again(problem: Problem, rng: Random) -> None:
    orders = random_orders(problem, rng)
    table = build_table(problem)
    again = orders_from_sequences(problem, table, merge(table, simulate(problem, orders)))
    assert set(again.ops()) == split(orders)
    simulate(problem, again)


@given(problems(), st.randoms(use_true_random=False))
@settings(max_examples=examples(150))
def test_memory_under_any_timing_is_within_the_level_along_the_sequence(problem: Problem, rng: Random) -> None:
    table = build_table(problem)
    merged = merge(table, simulate(problem, random_orders(problem, rng)))
    orders = orders_from_sequences(problem, table, merged)
    for device, level in zip(orders.devices, levels_bytes(problem, table, merged), strict=True):
        assert worst_case_peak_bytes(problem, tuple(device.streams()), orders.waits) <= level


def test_a_fused_backward_that_overtook_a_weight_pass_is_split_with_its_weights_in_order() -> None:
    problem = uniform(1, 2)
    overtaken = Orders.of_compute([[Op.parse(name) for name in ["F0.0", "F0.1", "B0.0", "BW0.1", "W0.0"]]])
    table = build_table(problem)
    orders = orders_from_sequences(problem, table, merge(table, simulate(problem, overtaken)))
    assert [str(op) for op in orders.devices[0].compute] == ["F0.0", "F0.1", "B0.0", "B0.1", "W0.0", "W0.1"]


@given(problems(), st.randoms(use_true_random=False))
@settings(max_examples=examples(50))
def test_orders_of_a_sequence_make_a_valid_schedule(problem: Problem, rng: Random) -> None:
    table = build_table(problem)
    devices = [{"memory_bytes": None}] * len(problem.devices)
    free = Problem.from_data({**problem.to_data(), "host_memory_bytes": None, "devices": devices})
    orders = orders_from_sequences(free, table, merge(table, simulate(problem, random_orders(problem, rng))))
    assert verify(build_schedule(free, orders, 0.0, "search", 0.0)).ok
