"""The executor's benchmark: what it compares, and how its figures come about."""

from __future__ import annotations

import pytest

from benchmarks.executor import DEVICES, MICROBATCHES, Cost, cost_of, ratios, schedules


def test_offload_is_measured_without_torch_and_moves_all_but_the_last_stage() -> None:
    found = schedules()
    assert [len(device.offload) for device in found["1f1b, offload"].devices] == [MICROBATCHES] * (DEVICES - 1) + [0]
    assert {op.kind for op in found["1f1b"].devices[0].compute.ops} == {"F", "BW"}
    assert {op.kind for op in found["zb-h1"].devices[0].compute.ops} == {"F", "B", "W"}


def test_cost_is_the_mean_host_time_an_op_the_slowest_rank_and_the_largest_peak() -> None:
    ranks = [{"host_s": 2e-3, "step_s": 5e-3, "peak_bytes": 70}, {"host_s": 4e-3, "step_s": 6e-3, "peak_bytes": 60}]
    assert cost_of(ranks, ops=20) == Cost(pytest.approx(150), pytest.approx(6000), 70)


def test_ratios_are_ours_over_theirs_in_the_row_of_ours() -> None:
    costs = {"1f1b, torch": Cost(200, 9, 100), "1f1b, optpipe": Cost(150, 9, 50), "x, offload, optpipe": Cost(1, 1, 1)}
    assert [ratios(name, costs) for name in costs] == [["", ""], ["0.75", "0.50"], ["", ""]]
