"""Merged sequences stand for orders: the same times, memory within the level that is counted along them."""

from __future__ import annotations

from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from optpipe.any_timing import any_timing_peak_bytes
from optpipe.orders import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.finish import finish
from solver.search.sequence import Merged, merge, orders_of
from solver.search.table import Table, table_of
from tests.problems import problems
from tests.random_plans import random_orders


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


def merged_of(problem: Problem, table: Table, orders: Orders) -> Merged:
    """The sequences of orders that have any."""
    merged = merge(table, simulate(problem, orders))
    assume(merged is not None)
    assert merged is not None
    return merged


def split(orders: Orders) -> set[Op]:
    """The ops of orders, fused backwards as two."""
    return {Op(kind, *op[1:]) for op in orders.ops() for kind in (op.kind if op.kind == "BW" else (op.kind,))}


@given(problems(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_sequences_of_any_orders_are_orders_again(problem: Problem, rng: Random) -> None:
    orders = random_orders(problem, rng)
    table = table_of(problem)
    again = orders_of(problem, table, merged_of(problem, table, orders))
    assert set(again.ops()) == split(orders)
    simulate(problem, again)


@given(problems(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_memory_under_any_timing_is_within_the_level_along_the_sequence(problem: Problem, rng: Random) -> None:
    table = table_of(problem)
    merged = merged_of(problem, table, random_orders(problem, rng))
    orders = orders_of(problem, table, merged)
    for device, level in zip(orders.devices, levels_bytes(problem, table, merged), strict=True):
        assert any_timing_peak_bytes(problem, tuple(device.streams()), orders.waits) <= level


@given(problems(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_orders_of_a_sequence_make_a_valid_schedule(problem: Problem, rng: Random) -> None:
    table = table_of(problem)
    devices = [{"memory_bytes": None}] * len(problem.devices)
    free = Problem.from_data({**problem.to_data(), "host_memory_bytes": None, "devices": devices})
    orders = orders_of(free, table, merged_of(problem, table, random_orders(problem, rng)))
    assert verify(finish(free, orders, 0.0, "search", 0.0)).ok
