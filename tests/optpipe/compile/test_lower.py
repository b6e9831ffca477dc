"""Lowering keeps what a schedule says and adds only messages, in one order for all devices."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.compile import Program, compile_schedule
from optpipe.compile.actions import RECEIVES, SENDS
from optpipe.compile.memory import planned_peaks_bytes
from optpipe.errors import DeadlockError, OrderError
from optpipe.orders import KINDS, Op
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from tests.optpipe.runtime.schedules import one_f_one_b, random_placement, random_schedule, v_wave
from tests.problems import problems


def text(program: Program) -> list[str]:
    return [" ".join(map(str, actions)) for actions in program.devices]


def unlimited(problem: Problem) -> Problem:
    devices = [{"memory_bytes": None}] * len(problem.devices)
    return Problem.from_data(problem.to_data() | {"devices": devices, "host_memory_bytes": None})


def test_one_f_one_b_with_an_offload_is_lowered_to_this() -> None:
    assert text(compile_schedule(one_f_one_b(2, 2, moved=[(0, 0)]))) == [
        "F0.0 SEND_F0.0->1 O0.0@0 F0.1 SEND_F0.1->1 RELEASE0.0 PREPARE0.0 R0.0 RECV_B0.0<-1 B0.0 W0.0 "
        "RECV_B0.1<-1 B0.1 W0.1",
        "RECV_F1.0<-0 RECV_F1.1<-0 F1.0 B1.0 SEND_B1.0->0 W1.0 F1.1 B1.1 SEND_B1.1->0 W1.1",
    ]


def test_stages_that_share_a_device_hand_over_without_messages() -> None:
    actions = [a for a in compile_schedule(v_wave(2, 2)).actions() if a.peer is not None]
    assert {a.message.boundary for a in actions} == {0, 2}, "stages 1 and 2 share device 1"


def test_a_receive_is_issued_before_the_op_that_runs_while_its_message_comes_and_no_earlier() -> None:
    """Posted earlier it would hold memory for nothing, later the message would have to wait for the op."""
    (first, *_), *_ = [compile_schedule(one_f_one_b(2, 3)).devices]
    places = {str(action): k for k, action in enumerate(first)}
    assert places["F0.1"] < places["RECV_B0.0<-1"] < places["B0.0"]


def test_what_leaves_comes_back() -> None:
    program = compile_schedule(one_f_one_b(2, 2, moved=[(0, 0), (0, 1)]))
    assert program.offloaded == {(0, 0), (0, 1)}


@given(problems(), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_stream_keeps_its_order_and_messages_are_first_in_first_out(problem: Problem, seed: int) -> None:
    schedule = random_schedule(unlimited(problem), seed)
    program = compile_schedule(schedule)
    for device, actions in zip(schedule.orders.devices, program.devices, strict=True):
        for stream in device.streams():
            assert [a.key for a in actions if a.key in set(stream)] == list(stream)
    ops = [a.key for a in program.actions() if a.kind in KINDS]
    assert sorted(ops) == sorted(schedule.orders.ops())
    crossing = sum(program.placement[s] != program.placement[s + 1] for s in range(len(problem.stages) - 1))
    assert sum(a.kind in SENDS for a in program.actions()) == 2 * crossing * problem.microbatches
    for d, e in ((d, e) for d in range(len(program.devices)) for e in range(len(program.devices))):
        sent = [a.message for a in program.devices[d] if a.kind in SENDS and a.peer == e]
        assert sent == [a.message for a in program.devices[e] if a.kind in RECEIVES and a.peer == d]


@given(problems(), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_one_list_a_device_needs_no_more_memory_than_three_streams(problem: Problem, seed: int) -> None:
    schedule = random_schedule(unlimited(problem), seed)
    peaks = planned_peaks_bytes(compile_schedule(schedule), problem, [0] * (len(problem.stages) - 1))
    assert all(peak <= d.peak_bytes_any_timing for peak, d in zip(peaks, schedule.devices, strict=True))


def test_the_digest_is_that_of_the_program_alone() -> None:
    one, same = (compile_schedule(one_f_one_b(2, 3)) for _ in range(2))
    assert one.digest == same.digest
    assert one.digest == "5e2214389cc4d4ac1da2b2db077f2919d9efb38b70a5ccccea8967193ec9b53b"
    others = [one_f_one_b(2, 3, fused=True), one_f_one_b(2, 3, moved=[(0, 1)]), one_f_one_b(2, 4)]
    assert len({one.digest, *(compile_schedule(other).digest for other in others)}) == 4


def test_the_digest_covers_waits_and_slabs_and_tells_which_device_differs() -> None:
    program = compile_schedule(one_f_one_b(3, 2, moved=[(1, 0)]))
    (slab,) = program.slabs[1]
    without_wait = tuple(a._replace(waits=()) if a.kind == "O" else a for a in program.devices[1])
    for changed in (
        replace(program, slabs=((), (slab._replace(size_bytes=3),), ())),
        replace(program, devices=(program.devices[0], without_wait, program.devices[2])),
    ):
        assert changed.digest != program.digest
        differs = [a != b for a, b in zip(changed.device_digests, program.device_digests, strict=True)]
        assert differs == [False, True, False]


def edited(schedule: Schedule, edit: object) -> Schedule:
    data = schedule.to_data() | {"problem": schedule.problem.to_data()}
    edit(data["devices"])  # type: ignore[operator]
    return Schedule.from_data(data)


def test_an_order_that_deadlocks_is_refused_with_its_circle() -> None:
    def b_before_f(devices: list[dict[str, list[object]]]) -> None:
        ops = devices[0]["compute"]
        ops[0], ops[2] = ops[2], ops[0]

    with pytest.raises(DeadlockError, match=r"B0\.0 -> "):
        compile_schedule(edited(one_f_one_b(2, 1), b_before_f))


def test_a_missing_op_is_refused_by_name() -> None:
    with pytest.raises(OrderError, match=r"W1\.1 is missing"):
        compile_schedule(edited(one_f_one_b(2, 2), lambda devices: devices[1]["compute"].pop()))


def test_random_placements_compile_whatever_the_planned_times_say() -> None:
    """Only the order counts: a document whose times are all zero gives a program that runs."""

    def no_times(devices: list[dict[str, list[dict[str, object]]]]) -> None:
        for device in devices:
            for stream in ("compute", "offload", "reload"):
                for op in device[stream]:
                    op["start_us"] = op["end_us"] = 0

    for seed in range(20):
        problem = random_placement(Random(seed), microbatches=3).to_data() | {"copy_channels": {"duplex": True}}
        schedule = random_schedule(Problem.from_data(problem), seed)
        program = compile_schedule(edited(schedule, no_times))
        assert {a.key for a in program.actions() if a.kind in KINDS} == set(schedule.orders.ops())
        assert Op("F", 0, 0) in {actions[0].key for actions in program.devices if actions}
