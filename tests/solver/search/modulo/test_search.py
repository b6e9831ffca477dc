"""Blocks repeated modulo a period: disjoint passes, memory that depends on order alone, orders for any m."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from benchmarks.pareto import minimum_period_us
from instances import instance, uniform
from optpipe.ops import Orders
from optpipe.problem import Device, Problem
from optpipe.simulate import simulate
from optpipe.stage import Stage
from solver.bounds import lower_bound_us
from solver.build import peak_budgets, within_budgets
from solver.limits import Cancel, Limits
from solver.search.annealing.table import budgets_bytes
from solver.search.modulo import Pattern, modulo_search
from solver.search.modulo.ends import Ends, Filler, few_units
from solver.search.modulo.pattern import Passes, orders_from_pattern
from solver.search.modulo.search import PatternPool, PooledPattern, fitting_patterns
from solver.solution import Solution
from tests.problems import problems
from tests.sample import examples


def found(problem: Problem, share: float = 1.0, width: int = 24, lanes: int = 1) -> Pattern | None:
    """A pattern whose period is `share` times the least."""
    passes = Passes.of(problem, lanes)
    period = share * float(passes.work_us().max()) / lanes
    found = fitting_patterns(passes, budgets_bytes(problem), period, width, 0.15, np.random.default_rng(0))
    return found[0] if found else None


def unit_v(p: int, m: int, chunks: int) -> Problem:
    """A V of equal passes of 10 us that hold everything until W ends."""
    memory = {"activation_bytes": 2, "backward_weight_bytes": 2, "budget": 2 * chunks}
    return uniform(p, m, v_shape=True, transfer_us=0, **memory)


def repeated(problem: Problem, pattern: Pattern) -> Orders:
    return orders_from_pattern(problem, [plan[:2] for plan in pattern.plan(problem.microbatches)])


def cold(problem: Problem) -> Solution:
    return Solution(bound_us=lower_bound_us(problem))


@pytest.mark.parametrize("name", ["zbv-6.2b-p16-m48-vhalf", "zb-14.6b-p16-m48-mem1", "c-real8-m32-b2-vshape-make"])
@pytest.mark.parametrize("share", [1.0, 1.07])
def test_passes_of_a_device_are_disjoint_modulo_the_period(name: str, share: float) -> None:
    pattern = found(instance(name), share)
    assert pattern is not None
    for sequence in pattern.sequences:
        begin = pattern.start_us[sequence] - pattern.round[sequence] * pattern.round_us
        end = begin + pattern.passes.duration_us[sequence]
        slack = 1e-6 * pattern.round_us
        assert (end[:-1] <= begin[1:] + slack).all()
        assert end[-1] <= begin[0] + pattern.round_us + slack


def test_inputs_come_in_time() -> None:
    pattern = found(instance("zbv-6.2b-p16-m48-vhalf"))
    assert pattern is not None
    passes = pattern.passes
    late = np.flatnonzero(passes.before >= 0)
    waits = pattern.start_us[late] - pattern.start_us[passes.before[late]] - passes.lag_us[late]
    assert (waits >= -1e-6 * pattern.period_us).all()


def test_v_half_memory_needs_no_repeating_bubble_on_the_measured_profile() -> None:
    pattern = found(instance("zbv-6.2b-p16-m48-vhalf"))
    assert pattern is not None
    assert pattern.period_us == pytest.approx(76926)


@pytest.mark.parametrize("name", ["zbv-6.2b-p16-m48-vhalf", "zb-6.2b-p8-m24-mem1"])
def test_peak_of_the_pattern_is_the_peak_of_its_orders(name: str) -> None:
    """Repeated as it is, the order reaches the peak that was counted modulo the period, and no more."""
    problem = instance(name)
    pattern = found(problem)
    assert pattern is not None
    orders = repeated(problem, pattern)
    assert peak_budgets(problem, orders) == pattern.peak_bytes.tolist()


def test_repeated_orders_take_one_period_a_microbatch() -> None:
    problem = instance("zbv-6.2b-p16-m48-vhalf")
    pattern = found(problem)
    assert pattern is not None
    orders = repeated(problem, pattern)
    most = (problem.microbatches - 1) * pattern.period_us + pattern.block_us
    assert simulate(problem, orders).makespan_us <= most * (1 + 1e-9)


@pytest.mark.parametrize(("p", "chunks"), [(4, 4), (8, 8), (16, 12)])
def test_unit_costs_need_v_mins_memory_and_have_no_repeating_bubble(p: int, chunks: int) -> None:
    problem = unit_v(p, 32, chunks)
    pattern = found(problem)
    assert pattern is not None
    assert pattern.period_us == pytest.approx(minimum_period_us(problem)) == pytest.approx(60)


@pytest.mark.parametrize("lanes", [1, 2])
def test_peak_of_the_pattern_is_the_peak_of_its_orders_with_lanes(lanes: int) -> None:
    problem = unit_v(4, 25, 6)
    pattern = found(problem, share=1.1, lanes=lanes)
    assert pattern is not None
    assert pattern.keeps_order
    orders = repeated(problem, pattern)
    assert peak_budgets(problem, orders) == pattern.peak_bytes.tolist()
    assert simulate(problem, orders).makespan_us <= 13 * 2 / lanes * pattern.round_us + pattern.block_us


def test_a_longer_block_holds_one_activation_more_for_each_round() -> None:
    problem = unit_v(8, 32, 16)
    pattern = found(problem)
    assert pattern is not None
    longer = pattern.stretched(16, 2)
    assert (longer.peak_bytes == pattern.peak_bytes + 2 * 2 * 2).all()
    assert longer.keeps_order
    assert pattern.stretched(32, 1).start_us[:32].tolist() == pattern.start_us[:32].tolist()


def test_a_block_stretched_evenly_holds_more_on_the_first_devices() -> None:
    problem = uniform(8, 32, transfer_us=0, budget=100)
    pattern = found(problem)
    assert pattern is not None
    longer = pattern.stretched(8, 8, over=8)
    added = longer.peak_bytes - pattern.peak_bytes
    assert longer.keeps_order
    assert (np.diff(added) <= 0).all()
    assert added[0] >= added[-1] + 2 * 6
    assert longer.block_us == pytest.approx(pattern.block_us + 8 * pattern.round_us)


def test_patterns_with_the_same_orders_have_the_same_key() -> None:
    pattern = found(unit_v(4, 8, 8))
    assert pattern is not None
    nudged = replace(pattern, start_us=pattern.start_us + 1e-9)
    assert nudged.key == pattern.key
    assert pattern.stretched(8, 1).key != pattern.key


def test_blocks_are_stretched_once_each_the_best_and_the_shortest_in_turns() -> None:
    problem = unit_v(4, 8, 8)
    pattern = found(problem)
    assert pattern is not None
    ends = Ends(np.zeros((2, 24), np.int64), 0.0, np.zeros(4, np.int64))
    blocks = [pattern.stretched(8, rounds) for rounds in (0, 1, 2)]
    pool = PatternPool()
    for block, value in zip(blocks, (30.0, 20.0, 10.0), strict=True):
        assert pool.is_new(block)
        assert not pool.is_new(block)
        assert pool.keep(PooledPattern(block, block, ends, value))
        assert not pool.keep(PooledPattern(block, block, ends, value + 1))
    order = [pool.next_to_stretch() for _ in range(4)]
    assert order == [blocks[2], blocks[0], blocks[1], None]


@given(problems(max_microbatches=4), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(60))
def test_any_ends_keep_the_budgets_of_the_pattern(problem: Problem, seed: int) -> None:
    assume(any(problem.work_us))  # without work there is no period
    pattern = found(problem, share=1.5, width=4)
    assume(pattern is not None)
    assert pattern is not None
    rng = np.random.default_rng(seed)
    passes = Passes.of(problem)
    filler = Filler(pattern, passes, problem.microbatches, budgets_bytes(problem), by_span=False)
    weights_last = rng.integers(filler.cool_down + 1)
    ends = Ends(rng.integers(5, size=(2, passes.size)), float(rng.random()), weights_last)
    assume(filler.value_us(ends) < np.inf)
    orders = orders_from_pattern(problem, filler.orders(ends))
    simulation = simulate(problem, orders)
    assert within_budgets(problem, orders, simulation)


def test_last_weight_passes_that_wait_let_the_last_backwards_through() -> None:
    """With room for W the last microbatches come back at the pace of F and B alone."""
    problem = uniform(4, 16, transfer_us=0, budget=100)
    pattern = found(problem)
    assert pattern is not None
    filler = Filler(pattern, Passes.of(problem), 16, budgets_bytes(problem), by_span=True)
    plain = Ends(np.zeros((2, 12), np.int64), 0.0, np.zeros(4, np.int64))
    deferring = replace(plain, weights_last=np.full(4, 8, np.int64))
    assert filler.value_us(deferring) < filler.value_us(plain)


@pytest.mark.parametrize("name", ["a-p16-m32-c0-b1o2-vshape-make", "zb-1.5b-p8-m24-mem1.5"])
def test_the_ends_are_optimal_at_half_and_at_ample_memory(name: str) -> None:
    """The first needs a block longer than the shortest one, the second one that is stretched along the devices."""
    problem = instance(name)
    limits = Limits(workers=1, deterministic_limit=8)
    answer = modulo_search(problem, limits, cold(problem), lambda answer: None)
    assert answer.value_us == pytest.approx(answer.bound_us)


def test_orders_are_not_written_where_that_would_take_longer_than_is_left() -> None:
    problem = unit_v(8, 4096, 8)
    reported: list[Solution] = []
    limits = Limits(workers=1, deterministic_limit=0.5)
    answer = modulo_search(problem, limits, cold(problem), reported.append)
    assert answer.orders is None
    assert not reported


def test_the_floor_of_the_period_is_memory_over_time() -> None:
    """Device 0 holds 2 bytes through the round trip and 1 byte as long as W runs, of a budget of 2."""
    problem = uniform(2, 4, budget=2)
    chain_us = 10 + 1 + 10 + 10 + 1 + 10
    assert minimum_period_us(problem) == pytest.approx((2 * chain_us + 1 * 10) / 2)


def test_the_time_of_the_search_counts_few_microbatches() -> None:
    """The ends are tuned on as many microbatches as both ends need, however many there are."""
    pattern = found(unit_v(4, 1024, 8))
    assert pattern is not None
    assert few_units(pattern, 64) == few_units(pattern, 1024) < 30
    assert few_units(pattern, 5) == 5


def test_offload_lets_a_pattern_into_a_smaller_budget() -> None:
    problem = instance("d-p8-m16-o1-mo0.5-b1o2-vshape-make")
    limits = Limits(workers=1, deterministic_limit=2)
    answer = modulo_search(problem, limits, cold(problem), lambda answer: None)
    assert answer.orders is not None
    assert any(device.offload for device in answer.orders.devices)
    assert 1 - max(problem.work_us) / answer.value_us < 0.2


def backward_without_length() -> Problem:
    """B1 takes no time, so that it may be planned at the instant of B0, which needs it."""
    common = {"device": 0, "forward_us": 1, "backward_weight_us": 1}
    first = Stage(**common, backward_input_us=1, activation_bytes=2, backward_weight_bytes=0)
    last = Stage(**common, backward_input_us=0, activation_bytes=0, backward_weight_bytes=1)
    devices = [Device(memory_bytes=2)]
    return Problem(format="optpipe.problem/1", microbatches=1, transfer_us=0, devices=devices, stages=[first, last])


@given(problems(max_microbatches=4))
@example(backward_without_length())
@settings(max_examples=examples(60))
def test_answers_keep_the_budgets_on_any_problem(problem: Problem) -> None:
    reported: list[Solution] = []
    limits = Limits(time_limit_s=60, workers=1, deterministic_limit=0.2)
    answer = modulo_search(problem, limits, cold(problem), reported.append)
    for one in (*reported, answer):
        if one.orders is not None:
            simulation = simulate(problem, one.orders)
            assert simulation.value_us == pytest.approx(one.value_us)
            assert within_budgets(problem, one.orders, simulation)
    values = [one.value_us for one in reported]
    assert values == sorted(values, reverse=True)


def test_a_deterministic_limit_gives_the_same_orders_again() -> None:
    problem = instance("c-p8-m16-f1-l2-b1-vshape-make")

    def run() -> Solution:
        limits = Limits(workers=1, seed=3, deterministic_limit=0.5)
        return modulo_search(problem, limits, cold(problem), lambda answer: None)

    assert run() == run()


def test_a_cancelled_search_answers_with_its_start() -> None:
    problem = uniform(4, 8)
    cancel = Cancel()
    cancel.request()
    start = cold(problem)
    answer = modulo_search(problem, Limits(cancel=cancel), start, lambda answer: None)
    assert answer == Solution(bound_us=start.bound_us)
