"""Byte-time by hand."""

from __future__ import annotations

from typing import Any

import pytest

from solver.bounds import lower_bound_us
from solver.bounds.memory_time import memory_time_bounds_us
from tests.problems import HALF, instance, uniform


def tight(m: int = 8, **more: Any) -> float:
    """The first of four devices with memory for two microbatches, all held until W's end."""
    problem = uniform(4, m, budget=4, backward_weight_bytes=2, objective="device_span", **more)
    return memory_time_bounds_us(problem)[0]


def test_little_with_both_ends() -> None:
    """Two bytes for 10 + 66 + 10 + 10 us; ramps leave 2 * 10 / 2 and 2 * 20 / 2 byte-us unused."""
    assert tight() == pytest.approx((8 * 2 * 96 + 10 + 20) / 4)


def test_each_microbatch_more_takes_its_share_of_memory() -> None:
    assert tight(1000) - tight(999) == pytest.approx(2 * 96 / 4)


def test_offload_saves_the_way_less_the_copies() -> None:
    """One byte for 66 - 20 us, a copy of 10 us each; all eight leave in 80 us."""
    assert tight(offload=HALF) == pytest.approx(80 + (8 * (2 * 96 - 46) + 30 - 4 * 80) / 4)


def test_copies_both_ways_on_one_channel_save_half_as_fast() -> None:
    one_channel = {"copy_channels": {"duplex": False}}
    assert tight(offload=HALF, **one_channel) == pytest.approx(160 + (8 * (2 * 96 - 46) + 30 - 4 * 160) / 4)


def test_copies_that_take_no_time_save_at_once() -> None:
    instant = {"bytes": 1, "offload_us": 0, "reload_us": 0}
    assert tight(offload=instant) == pytest.approx((8 * (2 * 96 - 66) + 30) / 4)


def test_the_way_to_the_device_and_back_comes_on_top() -> None:
    """The last device of three with memory for one microbatch: F, B and W in turn; the last W may come later."""
    problem = uniform(3, 6, budget=2, backward_weight_bytes=2)
    needed = 6 * 2 * 30
    assert memory_time_bounds_us(problem)[-1] == 2 * 11 + max(needed / 2, (needed - 2 * 10) / 2 + 2 * 11 + 10)


def test_bytes_that_no_sum_of_sizes_reaches_are_no_use() -> None:
    odd = uniform(4, 8, budget=5, backward_weight_bytes=2, objective="device_span")
    assert memory_time_bounds_us(odd)[0] == tight()


def test_no_budget_no_bound() -> None:
    assert set(memory_time_bounds_us(uniform(4, 8))) == {0.0}


def test_repeating_bubble_of_v_min_cannot_be_halved_on_uneven_costs() -> None:
    """At V-Min's memory (12 chunks on 16 devices) the measured profile leaves more than half of its .33."""
    problem = instance("zbv-6.2b-p16-m48-vmin")
    assert 1 - max(problem.work_us) / lower_bound_us(problem) > 0.23
