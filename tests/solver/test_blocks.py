"""Searches and bounds of problems with blocks: nothing is below a bound, and nothing worse than DualPipeV."""

from __future__ import annotations

from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.errors import DeadlockError, MethodError, OrderError
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.blocks import joined_orders
from solver.bounds import lower_bound_us
from solver.limits import Limits
from solver.published.dualpipe_v import dualpipe_v
from solver.solve import solve
from tests.optpipe.test_blocks import Data, random_blocks, random_problem
from tests.sample import examples
from tests.solver.published.test_dualpipe_v import v_blocks

SEEDS = st.integers(0, 10**6)


def sequences(ops: tuple[Op, ...]) -> list[tuple[Op, ...]]:
    """Every order of these ops in which each kind of a stage keeps the order of microbatches."""
    if not ops:
        return [()]
    first = {op[:2]: op for op in reversed(ops)}.values()
    return [(op, *rest) for op in first for rest in sequences(tuple(other for other in ops if other != op))]


def least_value_us(problem: Problem) -> float:
    """The least value over all orders of fused backwards, and all pairs of neighbours as a block or not."""
    units = range(problem.microbatches)
    mine = [tuple(Op(kind, s, i) for s in of for kind in ("F", "BW") for i in units) for of in problem.stages_of]
    best = float("inf")
    for lists in product(*map(sequences, mine)):
        pairs = [pair for ops in lists for pair in pairwise(ops)]
        may = [pair for pair in pairs if problem.block_of_units_us(*pair) is not None]
        for chosen in product([False, True], repeat=len(may)):
            blocks = dict(pair for pair, is_block in zip(may, chosen, strict=True) if is_block)
            try:
                orders = Orders([DeviceOrders(ops) for ops in lists], blocks=blocks)
                best = min(best, simulate(problem, orders).value_us)
            except (DeadlockError, OrderError):
                continue
    return best


@settings(max_examples=examples(15))
@given(SEEDS)
def test_no_bound_exceeds_the_least_value(seed: int) -> None:
    rng = Random(seed)
    data = random_problem(rng, microbatches=2)
    data["stages"] = [stage | {"split_backward": False, "offload": None} for stage in data["stages"][:2]]
    data["stages"][-1]["device"] = min(data["stages"][-1]["device"], len(data["stages"]) - 1)
    problem = Problem.from_data(data | {"overlaps": kept(data)})
    assert lower_bound_us(problem) <= least_value_us(problem) * (1 + 1e-9)


def kept(data: Data) -> list[Data]:
    """The overlaps of stages that are there."""
    return [one for one in data["overlaps"] if max(one["forward_stage"], one["backward_stage"]) < len(data["stages"])]


@settings(max_examples=examples(100))
@given(SEEDS)
def test_no_bound_exceeds_a_schedule(seed: int) -> None:
    rng = Random(seed)
    problem = Problem.from_data(random_problem(rng))
    value_us = min(simulate(problem, random_blocks(problem, rng)).value_us for _ in range(5))
    assert lower_bound_us(problem) <= value_us * (1 + 1e-9)


@settings(max_examples=examples(60))
@given(SEEDS)
def test_joining_neighbours_makes_nothing_longer(seed: int) -> None:
    rng = Random(seed)
    problem = Problem.from_data(random_problem(rng))
    orders = random_blocks(problem, rng)
    better = joined_orders(problem, orders)
    assert better.blocks.items() >= orders.blocks.items()
    assert simulate(problem, better).value_us <= simulate(problem, orders).value_us


@pytest.mark.parametrize(("budget", "most_us"), [(5, 29), (4, 35)])
def test_annealing_joins_what_no_order_of_ops_apart_shows(budget: int, most_us: float) -> None:
    """Values of an exact model of all orders and blocks are 29, proved, and 34; DualPipeV needs 5, for 30."""
    problem = v_blocks(2, 6, 2, devices=[{"memory_bytes": budget}] * 2)
    schedule = solve(problem, limits=Limits(600, workers=1, deterministic_limit=0.4))
    assert schedule.value_us <= most_us
    assert schedule.status == ("optimal" if budget == 5 else "feasible")


@pytest.mark.parametrize("budget", [None, 9, 6])
def test_a_search_is_never_worse_than_dualpipe_v_and_needs_less_memory(budget: int | None) -> None:
    data = v_blocks(4, 8, 2.4).to_data()
    problem = Problem.from_data(data | {"devices": [{"memory_bytes": budget}] * 4})
    published_us = simulate(problem, dualpipe_v(problem)).value_us
    schedule = solve(problem, limits=Limits(time_limit_s=1))
    assert not verify(schedule).violations
    assert schedule.value_us <= published_us or budget == 6
    assert max(device.peak_bytes_any_timing for device in schedule.devices) <= (budget or 99)
    assert schedule.orders.blocks or budget == 6


def test_slices_are_solved_without_dualpipe_v() -> None:
    """Its order runs microbatches whole; the searches join the units of slices."""
    problem = v_blocks(2, 4, 2, slices={"count": 2})
    with pytest.raises(MethodError, match=r"slices\.count is 2"):
        dualpipe_v(problem)
    assert verify(solve(problem, "auto", Limits(2, workers=1))).ok
