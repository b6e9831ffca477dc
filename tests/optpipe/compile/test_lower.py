"""Lowering keeps what a schedule says and adds only messages, in one order for all devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances.schedules import one_f_one_b, v_wave
from optpipe.compile import Program, check_program, compile_forward, compile_schedule, fuse_adjacent
from optpipe.compile.memory import planned_peaks_bytes
from optpipe.compile.program import EXCHANGES, RECEIVES, SENDS
from optpipe.errors import BudgetError, DeadlockError, InputError, OrderError
from optpipe.kinds import KINDS
from optpipe.ops import Op
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.spread import VocabularyPasses
from solver.build import build_schedule
from solver.solve import solve
from tests.optpipe.compile.player import play
from tests.optpipe.compile.test_check import moved
from tests.optpipe.compile.test_streams import placed_problems
from tests.optpipe.compile.vocabulary import vocabulary_schedule
from tests.optpipe.runtime.schedules import random_placement, random_schedule
from tests.problems import problems
from tests.sample import examples, some
from tests.unequal import random_orders as random_unequal_orders
from tests.unequal import random_unequal, unequal
from tests.unequal_schedules import with_factors


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
@settings(max_examples=examples(60))
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
@settings(max_examples=examples(60))
def test_one_list_a_device_needs_no_more_memory_than_three_streams(problem: Problem, seed: int) -> None:
    schedule = random_schedule(unlimited(problem), seed)
    peaks = planned_peaks_bytes(compile_schedule(schedule), problem, [0] * (len(problem.stages) - 1))
    assert all(peak <= d.peak_bytes_any_timing for peak, d in zip(peaks, schedule.devices, strict=True))


@pytest.mark.parametrize("seed", some(range(40)))
def test_unequal_microbatches_are_lowered_in_their_order_within_the_memory_of_any_timing(seed: int) -> None:
    """With modes, copies and transfers; the peaks of kept activations are above those of equal microbatches."""
    rng = Random(seed)
    data = random_unequal(rng) | {"slices": None}
    stages = [{k: v for k, v in stage.items() if not k.startswith("slice_")} for stage in data["stages"]]
    problem = unlimited(Problem.from_data(data | {"stages": stages}))
    orders, _, _ = random_unequal_orders(problem, rng)
    schedule = build_schedule(problem, orders, 0.0, "random", 0.0)
    program = compile_schedule(schedule)
    for device, actions in zip(schedule.orders.devices, program.devices, strict=True):
        assert [a.key for a in actions if a.key in set(device.compute)] == list(device.compute)
    peaks = planned_peaks_bytes(program, problem, [0] * (len(stages) - 1))
    assert all(peak <= d.peak_bytes_any_timing for peak, d in zip(peaks, schedule.devices, strict=True))


def test_the_memory_of_a_program_is_that_of_its_microbatches() -> None:
    """Activations times 1, 2 and 2.9, rounded up; device 0 of 1F1B holds two microbatches at a time."""
    schedule = with_factors(one_f_one_b(2, 3, fused=True), [{"bytes": 1}, {"bytes": 2}, {"bytes": 2.9}])
    [of_bytes] = {stage.activation_bytes for stage in schedule.problem.stages}
    program = compile_schedule(schedule)
    last = -(-of_bytes * 29 // 10)
    assert planned_peaks_bytes(program, schedule.problem, [0]) == [2 * of_bytes + last, last]
    # Device 0 makes the message of microbatch 2 beside the gradient of 1; device 1 receives it when it holds nothing.
    with_messages = planned_peaks_bytes(program, schedule.problem, [[10, 20, 40]])
    assert with_messages == [2 * of_bytes + last + 20 + 40, 40]
    budget = [{"memory_bytes": 2 * of_bytes + last - 1}, {"memory_bytes": None}]
    tight = Problem.from_data(schedule.problem.to_data() | {"devices": budget})
    with pytest.raises(BudgetError, match="device 0 holds"):
        check_program(program, tight)


def test_slices_run_forward_from_the_first_and_backward_from_the_last() -> None:
    program = compile_schedule(solve(unequal(2, 2, slices={"count": 2}), "seq1f1b"))
    assert (program.microbatches, program.slices, program.units) == (2, 2, 4)
    last = [str(action) for action in program.devices[1] if action.stream == "compute"]
    assert last == ["F1.0", "F1.1", "BW1.1", "F1.2", "BW1.0", "F1.3", "BW1.3", "BW1.2"]


def test_slices_have_the_memory_of_their_microbatches() -> None:
    """Two slices of 4 bytes, then two of 8: each device holds all of them when the first backward begins."""
    factors = [{"bytes": 1}, {"bytes": 2}]
    schedule = solve(unequal(2, 2, slices={"count": 2}, microbatch_factors=factors), "gpipe")
    peaks = planned_peaks_bytes(compile_schedule(schedule), schedule.problem, [0])
    assert peaks == [device.peak_bytes for device in schedule.devices] == [24, 24]


@pytest.mark.parametrize(("kind", "units"), [("F", (0, 1)), ("BW", (3, 2))])
def test_a_program_whose_slices_are_exchanged_is_refused(kind: str, units: tuple[int, int]) -> None:
    program = compile_schedule(solve(unequal(1, 2, slices={"count": 2}), "seq1f1b"))
    other = dict(zip(units, reversed(units), strict=True))
    exchanged = [
        action._replace(microbatch=other.get(action.microbatch, action.microbatch)) if action.kind == kind else action
        for action in program.devices[0]
    ]
    with pytest.raises(OrderError, match=f"before {kind}0.{units[0]}"):
        check_program(replace(program, devices=(tuple(exchanged),)))


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


def test_an_order_that_deadlocks_is_refused_with_its_cycle() -> None:
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


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 5))
@settings(max_examples=examples(60))
def test_any_placement_runs_every_forward_once(placement: list[int], microbatches: int) -> None:
    program = compile_forward(placement, microbatches)  # checked as every program is: it cannot deadlock
    times = play(program, lambda op: 1.0)
    forwards = [op for op in times if op.kind == "F"]
    assert sorted(forwards) == sorted(("F", s, i) for s in range(len(placement)) for i in range(microbatches))
    assert {action.kind for action in program.actions()} <= {"F", "SEND_F", "RECV_F"}
    for kind, s, i in forwards:
        assert not s or times[kind, s - 1, i][1] <= times[kind, s, i][0]  # type: ignore[index]


def test_a_linear_pipeline_is_full_after_its_warm_up() -> None:
    """4 stages and 10 microbatches take 4 + 10 - 1 forwards of time where messages take none."""
    times = play(compile_forward([0, 1, 2, 3], 10), lambda op: 1.0 if op.kind == "F" else 0.0)
    assert max(end for _, end in times.values()) == 13


def test_devices_without_a_stage_have_empty_lists() -> None:
    assert [len(actions) for actions in compile_forward([0, 2], 2, devices=4).devices] == [4, 0, 4, 0]


def with_sizes(problem: Problem, budget: int | None, **stage_fields: object) -> Problem:
    data = problem.to_data()
    stages = [stage | stage_fields for stage in data["stages"]]
    return Problem.from_data(data | {"stages": stages, "devices": [{"memory_bytes": budget}] * len(data["devices"])})


def compute(actions: object) -> str:
    return " ".join(str(a) for a in actions if a.kind in ("F", "B", "W", "BW"))  # type: ignore[attr-defined]


def test_one_f_one_b_becomes_the_one_that_was_planned_fused() -> None:
    split, fused = one_f_one_b(3, 4), one_f_one_b(3, 4, fused=True)
    found = fuse_adjacent(compile_schedule(split), split.problem)
    check_program(found, split.problem)
    planned = compile_schedule(fused)
    assert [compute(actions) for actions in found.devices] == [compute(actions) for actions in planned.devices]


def test_only_the_stages_that_ask_for_it_are_fused() -> None:
    schedule = one_f_one_b(3, 2)
    found = fuse_adjacent(compile_schedule(schedule), schedule.problem, stages={1})
    check_program(found, schedule.problem)
    assert {a.stage for a in found.actions() if a.kind == "BW"} == {1}
    assert {a.stage for a in found.actions() if a.kind == "W"} == {0, 2}


def test_a_pair_whose_workspace_does_not_fit_stays_as_it_is() -> None:
    """Device 0 holds 3 activations of 2 bytes at its first backward, then 2, then 1."""
    schedule = one_f_one_b(3, 3)
    problem = with_sizes(schedule.problem, 8, workspace_bytes={"BW": 3})
    found = fuse_adjacent(compile_schedule(schedule), problem)
    check_program(found, problem)
    assert compute(found.devices[0]) == "F0.0 F0.1 F0.2 B0.0 W0.0 BW0.1 BW0.2"


def test_a_pair_with_memory_taken_or_given_back_between_stays_as_it_is() -> None:
    """W0.0 lets the memory of R0.1 go only when it is over: R0.1 waits for W0.0, PREPARE0.1 is behind it."""
    schedule = one_f_one_b(2, 3, moved=[(0, 0), (0, 1), (0, 2)])
    program = compile_schedule(schedule)
    stream = [a for a in program.devices[0] if a.stream == "compute"]
    apart = {a[1:3] for a, b in pairwise(stream) if a.kind == "B" and b.kind != "W"}
    found = fuse_adjacent(program, schedule.problem)
    check_program(found, schedule.problem)
    assert {a[1:3] for a in found.devices[0] if a.kind == "B"} == apart


@given(placed_problems(), st.integers(0, 10**6))
@settings(max_examples=examples(60))
def test_what_is_fused_runs_keeps_its_order_and_needs_no_more_memory(problem: Problem, seed: int) -> None:
    """Without workspace BW holds what B held before it, and what W left after it."""
    problem = with_sizes(problem, None, workspace_bytes={}, backward_weight_bytes=0)
    program = compile_schedule(random_schedule(problem, seed))
    found = fuse_adjacent(program, problem)
    check_program(found, problem)
    play(found, lambda op: 1.0)
    no_messages = [0] * (len(problem.stages) - 1)
    peaks = zip(*(planned_peaks_bytes(p, problem, no_messages) for p in (found, program)), strict=True)
    assert all(fused <= split for fused, split in peaks)
    for before, after in zip(program.devices, found.devices, strict=True):
        fused = {a[1:3] for a in after if a.kind == "BW"}
        kept = [a.key for a in before if a.kind not in ("B", "W", "BW") or a[1:3] not in fused]
        assert kept == [a.key for a in after if a.kind != "BW"]


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), one_f_one_b(2, 3, fused=True), v_wave(2, 3)])
def test_every_stage_is_reduced_once_right_after_its_last_weight_gradient(schedule: Schedule) -> None:
    program = compile_schedule(schedule, reduce_gradients=True)
    assert sorted(a.stage for a in program.actions() if a.kind == "REDUCE") == list(range(len(program.placement)))
    for actions in program.devices:
        for k, action in enumerate(actions):
            if action.kind == "REDUCE":
                assert actions[k - 1].kind in ("W", "BW")
                assert actions[k - 1].stage == action.stage
                assert not any(a.kind in ("W", "BW") and a.stage == action.stage for a in actions[k:])


def test_a_device_goes_on_with_its_other_stage_meanwhile() -> None:
    """V shape: the backward of the stage on the way up is over long before that of the stage on the way down."""
    compute = [str(a) for a in compile_schedule(v_wave(1, 2), reduce_gradients=True).devices[0] if a.kind != "F"]
    assert compute == ["B1.0", "W1.0", "B1.1", "W1.1", "REDUCE1.0", "B0.0", "W0.0", "B0.1", "W0.1", "REDUCE0.0"]


def test_without_asking_there_is_none() -> None:
    assert not any(a.kind == "REDUCE" for a in compile_schedule(one_f_one_b(2, 2)).actions())


def test_a_reduction_before_a_weight_gradient_is_refused() -> None:
    program = compile_schedule(one_f_one_b(2, 2), reduce_gradients=True)
    with pytest.raises(OrderError, match=r"runs REDUCE0\.0 at place 5, before W0\.0 at place 7"):
        check_program(moved(program, 0, "REDUCE0.0", 5))


def test_parameters_are_gathered_before_the_first_forward_and_gradients_reduced_as_often_as_asked() -> None:
    program = compile_schedule(v_wave(2, 5), reduce_gradients=True, gather_parameters=True, reduce_every=2)
    check_program(program)
    for actions in program.devices:
        for s in {action.stage for action in actions}:
            own = [str(a) for a in actions if a.stage == s and a.kind in ("GATHER", "F", "W", "REDUCE_PART", "REDUCE")]
            assert own[0] == f"GATHER{s}.0"
            late = [name for name in own if not name.startswith("F")][1:]
            assert late == [
                *(f"W{s}.0", f"W{s}.1", f"REDUCE_PART{s}.1", f"W{s}.2", f"W{s}.3", f"REDUCE_PART{s}.3"),
                *(f"W{s}.4", f"REDUCE{s}.0"),
            ]


def test_devices_exchange_a_vocabulary_layer_in_one_order() -> None:
    assert text(compile_schedule(vocabulary_schedule(2, 1, 1))) == [
        "F0.0 SEND_F0.0->1 BROADCAST0.0 S0.0 ALL_GATHER0.0 REDUCE_INPUT0.0 T0.0 RECV_B0.0<-1 BW0.0",
        "RECV_F1.0<-0 F1.0 BROADCAST1.0 S1.0 ALL_GATHER1.0 REDUCE_INPUT1.0 BW1.0 SEND_B1.0->0 T1.0",
    ]


def test_forwards_alone_end_in_both_passes_of_a_vocabulary_layer() -> None:
    program = compile_forward([0, 1], 2, vocabulary=VocabularyPasses("S", "T", 1))
    assert text(program) == [
        "F0.0 SEND_F0.0->1 F0.1 SEND_F0.1->1 BROADCAST0.0 S0.0 ALL_GATHER0.0 T0.0 BROADCAST0.1 S0.1 ALL_GATHER0.1 T0.1",
        "RECV_F1.0<-0 RECV_F1.1<-0 F1.0 BROADCAST1.0 S1.0 ALL_GATHER1.0 T1.0 F1.1 BROADCAST1.1 S1.1 ALL_GATHER1.1 T1.1",
    ]


@pytest.mark.parametrize(("p", "barriers"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_programs_of_vocabulary_layers_hold_what_is_planned(p: int, barriers: int) -> None:
    schedule = vocabulary_schedule(p, 2 * p, barriers, microbatch_factors=[{"bytes": 1.5}] * p + [{}] * p)
    program = compile_schedule(schedule)
    for kind in EXCHANGES:
        orders = [[a.microbatch for a in actions if a.kind == kind] for actions in program.devices]
        assert orders == [[*range(2 * p)]] * p
    planned = [device.peak_bytes for device in schedule.devices]
    assert planned_peaks_bytes(program, schedule.problem, [0] * p) == planned


def test_other_passes_and_replicas_are_refused() -> None:
    with pytest.raises(InputError, match="passes S, T, but only those of a vocabulary layer can run"):
        compile_schedule(vocabulary_schedule(2, 2, 1, gates=None))
    with pytest.raises(InputError, match="not summed over replicas"):
        compile_schedule(vocabulary_schedule(2, 2, 1), reduce_gradients=True)
