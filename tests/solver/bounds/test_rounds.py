"""Byte-time by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import HALF, WHOLE, instance, uniform
from instances.four_by_eight import four_by_eight
from optpipe.problem import Problem
from solver.bounds import lower_bound_us
from solver.bounds.rounds import round_bounds_us
from solver.bounds.units import memory_time_bounds_us
from solver.exact.cp_sat.model import solve_cp_sat
from solver.exact.relaxation import projected
from solver.limits import Limits
from tests.sample import examples
from tests.solutions import serial_start


def tight(m: int = 8, budget: int = 4, kept: int = 2, **more: Any) -> float:
    """The first of four devices with memory for two microbatches, all held until W's end."""
    problem = uniform(4, m, budget=budget, backward_weight_bytes=kept, objective="device_span", **more)
    return memory_time_bounds_us(problem)[0]


def test_little_with_both_ends() -> None:
    """Two bytes for 10 + 66 + 10 + 10 us; beside the first F and the last B and W two more bytes are unused."""
    assert tight() == pytest.approx((8 * 2 * 96 + 2 * 10 + 2 * 20) / 4)


def test_each_microbatch_more_takes_its_share_of_memory() -> None:
    assert tight(1000) - tight(999) == pytest.approx(2 * 96 / 4)


def test_offload_saves_the_way_less_the_copies() -> None:
    """One byte for 66 - 20 us, a copy of 10 us each; all eight leave in 80 us."""
    assert tight(offload=HALF) == pytest.approx(80 + (8 * (2 * 96 - 46) + 60 - 4 * 80) / 4)


def test_copies_both_ways_on_one_channel_save_half_as_fast() -> None:
    one_channel = {"copy_channels": {"duplex": False}}
    assert tight(offload=HALF, **one_channel) == pytest.approx(160 + (8 * (2 * 96 - 46) + 60 - 4 * 160) / 4)


def test_copies_that_take_no_time_save_at_once() -> None:
    instant = {"bytes": 1, "offload_us": 0, "reload_us": 0}
    assert tight(offload=instant) == pytest.approx((8 * (2 * 96 - 66) + 60) / 4)


def test_the_way_to_the_device_and_back_comes_on_top() -> None:
    """The last device of three with memory for one microbatch: F, B and W in turn; the last W may come later."""
    problem = uniform(3, 6, budget=2, backward_weight_bytes=2)
    needed = 6 * 2 * 30
    assert memory_time_bounds_us(problem)[-1] == 2 * 11 + max(needed / 2, (needed - 2 * 10) / 2 + 2 * 11 + 10)


def test_bytes_that_no_sum_of_sizes_reaches_are_no_use() -> None:
    odd = uniform(4, 8, budget=5, backward_weight_bytes=2, objective="device_span")
    assert memory_time_bounds_us(odd)[0] == tight()


def test_room_for_half_an_activation_is_no_use_to_activations() -> None:
    """One of 2 bytes fits in 3, each for 10 + 66 + 10 us less 46 away; W of the last one follows, others fit beside."""
    one_channel = {"offload": WHOLE, "copy_channels": {"duplex": False}}
    assert tight(budget=3, kept=1, **one_channel) == 8 * (86 - 46) + 10


def test_proves_one_of_the_family_optimal() -> None:
    """Four devices with room for one and a half activations; copies take one and a half times as long as F."""
    assert lower_bound_us(four_by_eight(72)) == 7272


def test_no_budget_no_bound() -> None:
    assert set(memory_time_bounds_us(uniform(4, 8))) == {0.0}


def test_repeating_bubble_of_v_min_cannot_be_halved_on_uneven_costs() -> None:
    """At V-Min's memory (12 chunks on 16 devices) the measured profile leaves more than half of its .33."""
    problem = instance("zbv-6.2b-p16-m48-vmin")
    assert 1 - max(problem.work_us) / lower_bound_us(problem) > 0.23


def first(m: int, budget: int, kept: int, **more: Any) -> float:
    """The bound from the first of four devices: F, B and W of 10 us, turnaround 66 us, activations of 2 bytes."""
    objective = "device_span"
    return round_bounds_us(uniform(4, m, budget=budget, backward_weight_bytes=kept, objective=objective, **more))[0]


@pytest.mark.parametrize("m", [2, 5, 8])
def test_one_microbatch_at_a_time(m: int) -> None:
    assert first(m, 2, kept=2) == m * 96
    assert first(m, 2, kept=0) == m * 86 + 10


def test_the_last_round_begins_as_late_as_the_work_of_those_before_it_in_it() -> None:
    """Two fit; of seven microbatches three rounds, of eight another that begins with F, B and W of the other."""
    assert first(7, 4, kept=2) == 4 * 96
    assert first(8, 4, kept=2) == 4 * 96 + 30


def test_weights_that_fit_beside_the_activations_may_wait() -> None:
    """A byte over holds one pending W: rounds of 86 us, but all eight W run before the end."""
    assert first(7, 5, kept=1) == 3 * 86 + 96
    assert first(7, 5, kept=2) == 4 * 96 == first(7, 4, kept=1)


@pytest.mark.parametrize("budget", [1, 16, None])
def test_nothing_to_say_where_none_or_all_fit(budget: int | None) -> None:
    problem = uniform(4, 8, budget=budget)
    assert set(round_bounds_us(problem)) == {0.0}


def test_of_others_only_what_never_leaves_takes_room() -> None:
    """The F that starts takes 2 of 4 bytes, so that two halves and no pending W remain beside it: three in flight."""
    assert first(7, 4, kept=1, offload=HALF) == 3 * 96
    assert first(8, 4, kept=1, offload=HALF) == 3 * 96 + 30
    assert first(8, 4, kept=1, offload=WHOLE) == 0.0


def test_nothing_to_say_with_more_stages() -> None:
    assert set(round_bounds_us(uniform(4, 8, budget=4, v_shape=True))) == {0.0}


def test_the_way_to_a_device_and_back_comes_on_top() -> None:
    problem = uniform(4, 8, budget=2, backward_weight_bytes=2)
    assert round_bounds_us(problem)[3] == 3 * 11 + 8 * 30 + 3 * 11
    assert round_bounds_us(problem)[0] == 8 * 96


def test_is_the_optimum_of_the_first_device_alone() -> None:
    problem = instance("a-p4-m8-c0-b1o2-linear-make")
    alone = projected(problem, [0, len(problem.stages) - 1])
    assert round_bounds_us(problem)[0] == optimum_us(alone, work=2.0)


@settings(max_examples=examples(25))
@given(st.integers(2, 6), st.integers(2, 9), st.integers(0, 4), st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_no_schedule_is_below(m: int, budget: int, kept: int, times: list[int]) -> None:
    data = uniform(2, m, budget=budget, backward_weight_bytes=kept, objective="device_span").to_data()
    for stage in data["stages"]:
        stage |= dict(zip(("forward_us", "backward_input_us", "backward_weight_us"), times, strict=True))
    problem = Problem.from_data(data)
    if kept <= budget:
        assert max(round_bounds_us(problem)) <= optimum_us(problem, work=0.3) + 1e-9


def optimum_us(problem: Problem, work: float) -> float:
    """The best value found, which the work is enough to prove for problems as small as these."""
    start = serial_start(problem)
    assert start is not None
    return solve_cp_sat(problem, Limits(workers=1, deterministic_limit=work), start, lambda _: None).value_us
