"""The planned peak, recomputed by hand."""

from __future__ import annotations

from optpipe.compile import compile_schedule
from optpipe.compile.memory import planned_peaks_bytes
from optpipe.problem import Problem
from tests.optpipe.runtime.schedules import one_f_one_b, v_wave

SIZES = {
    "activation_bytes": 100,
    "backward_weight_bytes": 60,
    "workspace_bytes": {"F": 7, "B": 30, "W": 5, "BW": 31},
    "offload": {"bytes": 80, "offload_us": 1, "reload_us": 1},
}


def sized(problem: Problem) -> Problem:
    data = problem.to_data()
    return Problem.from_data(data | {"stages": [stage | SIZES for stage in data["stages"]]})


def test_messages_count_from_receive_to_use() -> None:
    """Device 0: F0.1 beside F0.0, then B0.0 with its gradient used. Device 1: F1.1 has come while B1.0 works."""
    schedule = one_f_one_b(2, 2)
    peaks = planned_peaks_bytes(compile_schedule(schedule), sized(schedule.problem), [10])
    assert peaks == [200 + 30, 10 + 100 + 30]


def test_fused_backwards_have_their_own_workspace() -> None:
    schedule = one_f_one_b(2, 2, fused=True)
    peaks = planned_peaks_bytes(compile_schedule(schedule), sized(schedule.problem), [10])
    assert peaks == [200 + 31, 10 + 100 + 31]


def test_what_is_on_the_host_does_not_count() -> None:
    """20 bytes of F0.0 stay while F0.1 runs; back for B0.0, beside F0.1 with its 20."""
    schedule = one_f_one_b(2, 2, moved=[(0, 0), (0, 1)])
    peaks = planned_peaks_bytes(compile_schedule(schedule), sized(schedule.problem), [10])
    assert peaks[0] == 20 + 100 + 30


def test_messages_to_a_stage_on_the_same_device_count_until_used() -> None:
    """V shape on one device: F0 of both microbatches leave their outputs (10 each) for F1."""
    schedule = v_wave(1, 2)
    peaks = planned_peaks_bytes(compile_schedule(schedule), sized(schedule.problem), [10])
    assert peaks == [400 + 30]
