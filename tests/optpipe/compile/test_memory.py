"""The planned peak, recomputed by hand."""

from __future__ import annotations

from instances.schedules import one_f_one_b, v_wave
from optpipe.compile import compile_schedule
from optpipe.compile.memory import planned_peaks_bytes
from optpipe.problem import Problem

SIZES = {
    "activation_bytes": 100,
    "backward_weight_bytes": 60,
    "workspace_bytes": {"F": 7, "B": 30, "W": 5, "BW": 31},
    "offload": {"bytes": 80, "offload_us": 1, "reload_us": 1},
}


def sized(problem: Problem, **more: object) -> Problem:
    data = problem.to_data()
    return Problem.from_data(data | {"stages": [stage | SIZES | more for stage in data["stages"]]})


def test_messages_count_from_receive_to_use() -> None:
    """Device 0: F0.1 beside F0.0, then B0.0 with its gradient used. Device 1: F1.1 has come while B1.0 works."""
    schedule = one_f_one_b(2, 2)
    peaks = planned_peaks_bytes(compile_schedule(schedule), sized(schedule.problem), [10])
    assert peaks == [200 + 30, 10 + 100 + 30]


def test_fused_backwards_have_their_own_workspace() -> None:
    schedule = one_f_one_b(2, 2, fused=True)
    peaks = planned_peaks_bytes(compile_schedule(schedule), sized(schedule.problem), [10])
    assert peaks == [200 + 31, 10 + 100 + 31]


def test_what_has_left_does_not_count() -> None:
    """F0.2 needs 200 beside its 100, F0.1 has 100, and F0.0, for whose offload it waits, has left 20."""
    schedule = one_f_one_b(3, 3, moved=[(0, 0)])
    problem = sized(schedule.problem, workspace_bytes={"F": 200})
    program = compile_schedule(schedule)
    assert [str(a) for a in program.devices[0] if a.stream == "compute"][2:4] == ["RELEASE0.0", "F0.2"]
    assert planned_peaks_bytes(program, problem, [0, 0])[0] == 20 + 100 + 100 + 200


def test_what_is_still_being_copied_counts() -> None:
    """F0.0 leaves while F0.1 runs, which makes a message of 10. B0.0 waits for O0.1, of which 20 stay."""
    schedule = one_f_one_b(2, 2, moved=[(0, 0), (0, 1)])
    program = compile_schedule(schedule)
    assert planned_peaks_bytes(program, sized(schedule.problem), [10])[0] == 100 + 100 + 10
    needy = sized(schedule.problem, workspace_bytes={"B": 100})
    assert planned_peaks_bytes(program, needy, [10])[0] == 20 + 100 + 100


def test_messages_to_a_stage_on_the_same_device_count_until_used() -> None:
    """V shape on one device: F0 of both microbatches leave their outputs (10 each) for F1."""
    schedule = v_wave(1, 2)
    peaks = planned_peaks_bytes(compile_schedule(schedule), sized(schedule.problem), [10])
    assert peaks == [400 + 30]
