"""A planned step compares equal; a changed one shows that change, in the right place."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import uniform
from optpipe.errors import DeadlockError, OrderError
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.trace.compare import Need, Span, compare, deciding_path, find_precedences, planned_spans, retimed
from optpipe.trace.document import Trace
from optpipe.verify import find_causes
from solver.build import build_schedule
from solver.solve import solve
from tests.optpipe.plot.schedules import all_forwards_first, pair
from tests.optpipe.trace.traces import action, trace_data, trace_of
from tests.problems import problems
from tests.random_plans import execute, random_orders
from tests.recomputing import FULL, FULL_AND_OFFLOAD, SELECTIVE, SELECTIVE_AND_OFFLOAD, random_executable
from tests.unequal import unequal


def slower(schedule: Schedule, by_us: dict[Op, float]) -> dict[Op, Span]:
    """The schedule's times when some ops take so much longer."""
    planned = planned_spans(schedule)
    return retimed(find_precedences(schedule), {op: s.duration_us + by_us.get(op, 0.0) for op, s in planned.items()})


@pytest.mark.parametrize("processes", [True, False])
def test_a_step_as_planned_differs_in_nothing(processes: bool) -> None:
    schedule = pair()
    found = compare(trace_of(schedule, processes=processes))
    assert found.basis == ("measured" if processes else "re-timed")
    assert found.step_us == found.planned_step_us == schedule.value_us
    assert found.work_ratio == 1.0
    assert found.plan_fits
    for figures, plan in zip(found.devices, schedule.devices, strict=True):
        assert figures.bubble == figures.planned_bubble == pytest.approx(plan.bubble)
        assert figures.busy_us == figures.planned_busy_us == plan.busy_us
        if processes:  # otherwise what the other device computes counts too
            assert figures.hidden == figures.planned_hidden
    assert all(difference.difference_us == 0.0 for difference in found.differences)
    assert all(kind.median_us == kind.planned_us for kind in found.kinds)
    path = found.path
    assert (path.op_difference_us, path.gap_difference_us, path.slack_us) == (0.0, 0.0, 0.0)


def test_collectives_lie_in_the_bubble_or_make_the_step_longer() -> None:
    """A gather begins before the first op, one lies between ops, and a reduction is behind the last op."""
    schedule = pair()
    data = trace_data(schedule, {op: Span(s + 100, e + 100) for op, (s, e) in planned_spans(schedule).items()})
    end_us = 100 + schedule.value_us
    for kind, i, begin_us, done_us in (
        ("GATHER", 0, 88, 103),
        ("REDUCE_PART", 1, 110, 114),
        ("REDUCE", 2, end_us - 1, end_us + 7),
    ):
        data["devices"][1]["actions"].append(action(Op(kind, 1, i), begin_us, begin_us, done_us))
    plain, found = compare(trace_of(schedule)), compare(Trace.from_data(data))
    assert found.step_us == plain.step_us
    assert [device.bubble for device in found.devices] == [device.bubble for device in plain.devices]
    assert [device.collectives_us for device in found.devices] == [0, 15 + 4 + 8]
    assert [device.exposed_collectives_us for device in found.devices] == pytest.approx([0, 12 + 7])


def test_one_slow_op_is_the_largest_difference_and_delays_the_step() -> None:
    schedule = pair()
    slow = Op("F", 0, 0)  # nothing can begin before it
    found = compare(trace_of(schedule, slower(schedule, {slow: 7.0})))
    first = found.differences[0]
    assert (first.op, first.device, first.planned_us, first.measured_us) == ("F0.0", 0, 10.0, 17.0)
    assert (first.difference_us, first.on_path) == (7.0, True)
    assert found.step_us - found.planned_step_us == found.path.op_difference_us == 7.0
    assert found.path_ops >= {slow}


def test_an_op_that_was_quicker_is_a_difference_too() -> None:
    schedule = pair()
    found = compare(trace_of(schedule, slower(schedule, {Op("F", 0, 0): 7.0, Op("F", 0, 1): -8.0})))
    assert [(d.op, d.difference_us) for d in found.differences[:2]] == [("F0.1", -8.0), ("F0.0", 7.0)]


def test_a_slow_op_that_nobody_waits_for_does_not_decide_the_end() -> None:
    schedule = pair()
    found = compare(trace_of(schedule, slower(schedule, {Op("O", 0, 3): 0.5})))
    assert found.differences[0].op == "O0.3"
    assert not found.differences[0].on_path
    assert found.step_us == found.planned_step_us


def test_a_late_start_is_a_gap() -> None:
    schedule = all_forwards_first(uniform(1, 2))
    late = {op: Span(s.start_us + 4.0, s.end_us + 4.0) for op, s in planned_spans(schedule).items()}
    late[Op("F", 0, 0)] = planned_spans(schedule)[Op("F", 0, 0)]
    found = compare(trace_of(schedule, late))
    assert found.step_us - found.planned_step_us == found.path.gap_difference_us == 4.0
    assert (found.path.op_difference_us, found.path.slack_us) == (0.0, 0.0)


def test_parts_of_the_difference_add_up() -> None:
    schedule = pair()
    by_us = {op: float(k % 5) for k, op in enumerate(planned_spans(schedule))}
    found = compare(trace_of(schedule, slower(schedule, by_us)))
    path = found.path
    total = path.op_difference_us + path.gap_difference_us + path.slack_us
    assert total == pytest.approx(found.step_us - found.planned_step_us)
    assert path.slack_us <= 0.0  # no path of the plan is longer than the plan


def one_after_the_other(schedule: Schedule) -> dict[Op, Span]:
    """The planned durations, no two ops at once on any device: as one thread would run them."""
    spans, now_us = {}, 0.0
    for op, span in sorted(planned_spans(schedule).items(), key=lambda item: item[1]):
        spans[op] = Span(now_us, now_us + span.duration_us)
        now_us += span.duration_us
    return spans


def test_devices_that_took_turns_are_re_timed() -> None:
    schedule = pair()
    found = compare(trace_of(schedule, one_after_the_other(schedule), processes=False))
    assert found.basis == "re-timed"
    assert found.step_us == schedule.value_us
    work_us = sum(span.duration_us for span in planned_spans(schedule).values())
    assert found.measured_step_us == work_us > schedule.value_us


def test_re_timing_takes_medians() -> None:
    """One disturbed op of four leaves the re-timed step alone, and stands among the differences."""
    schedule = pair()
    found = compare(trace_of(schedule, slower(schedule, {Op("F", 0, 2): 5000.0}), processes=False))
    assert found.step_us == schedule.value_us
    assert found.differences[0].op == "F0.2"


def test_share_of_copies_beside_compute() -> None:
    schedule = pair()
    spans = planned_spans(schedule)
    compute = [span for op, span in spans.items() if op.stage == 0 and op.stream == "compute"]
    copies = [span for op, span in spans.items() if op.stream != "compute"]
    hidden_us = sum(max(0.0, min(a.end_us, b.end_us) - max(a.start_us, b.start_us)) for a in copies for b in compute)
    first, second = compare(trace_of(schedule)).devices
    assert first.hidden == pytest.approx(hidden_us / sum(copy.duration_us for copy in copies))
    assert 0.0 < first.hidden < 1.0  # type: ignore[operator]
    assert second.hidden is None
    assert compare(trace_of(schedule, one_after_the_other(schedule))).devices[0].hidden == 0.0


def test_copies_are_hidden_by_all_compute_of_their_process() -> None:
    """As on one GPU that plays several devices; device 1 computes without a pause from here to there."""
    schedule = pair()
    spans = planned_spans(schedule)
    at_us = 10_000.0
    for op in sorted(op for op in spans if op.stage == 1):
        spans[op] = Span(at_us, at_us + 100.0)
        at_us += 100.0
    for k, op in enumerate(op for op in spans if op.stream != "compute"):
        spans[op] = Span(at_us - 10.0 + 40 * k, at_us + 10.0 + 40 * k)  # half of the first beside it
    alone, shared = (compare(trace_of(schedule, spans, processes=processes)) for processes in (True, False))
    assert alone.devices[0].hidden == 0.0
    assert shared.devices[0].hidden == pytest.approx(10 / 80)


def test_an_op_within_the_time_of_another_one_ends_no_compute() -> None:
    """As on one GPU: F0.0 runs beside the beginning of F1.0, which hides the copies to its end."""
    schedule = pair()
    spans = planned_spans(schedule)
    spans |= {op: Span(20_000.0, 20_000.0) for op in spans if op.stream == "compute"}
    spans |= {Op("F", 1, 0): Span(10_000.0, 11_000.0), Op("F", 0, 0): Span(10_010.0, 10_020.0)}
    spans |= {op: Span(10_500.0 + k, 10_600.0) for k, op in enumerate(op for op in spans if op.stream != "compute")}
    assert compare(trace_of(schedule, spans, processes=False)).devices[0].hidden == pytest.approx(1.0)


def test_medians_by_kind_and_stage() -> None:
    schedule = pair()
    found = compare(trace_of(schedule, slower(schedule, {Op("BW", 1, i): 2.0 for i in range(3)})))
    kinds = {(kind.kind, kind.stage): kind for kind in found.kinds}
    assert [(k.kind, k.stage) for k in found.kinds] == [(k, 0) for k in ("F", "B", "W", "O", "R")] + [
        ("F", 1),
        ("BW", 1),
    ]
    assert (kinds["BW", 1].ops, kinds["BW", 1].planned_us, kinds["BW", 1].median_us) == (4, 20.0, 22.0)
    assert kinds["R", 0].ops == 2


def in_modes(seed: int) -> Schedule:
    """Random, of one device's stages; copies and recomputations take another time in each mode."""
    modes = [
        FULL | {"recompute_us": 5},
        FULL_AND_OFFLOAD | {"recompute_us": 6},
        SELECTIVE | {"recompute_us": 2},
        SELECTIVE_AND_OFFLOAD | {"recompute_us": 3},
    ]
    return random_executable([0, 1], 8, seed, modes)


@pytest.mark.parametrize("seed", range(4))
def test_recomputations_and_copies_are_compared_mode_by_mode(seed: int) -> None:
    """A median over modes would be of none of them, and re-timed by it a step as planned would differ."""
    schedule = in_modes(seed)
    found = compare(trace_of(schedule, processes=False))
    assert (found.basis, found.step_us) == ("re-timed", schedule.value_us)
    assert all(kind.median_us == kind.planned_us for kind in found.kinds)
    recomputing = {kind.mode: kind for kind in found.kinds if kind.kind == "CBW" and kind.stage == 0}
    assert {mode: kind.planned_us for mode, kind in recomputing.items()}.items() <= {
        ("full", 7),
        ("full+offload", 8),
        ("selective", 4),
        ("selective+offload", 5),
    }
    assert {kind.mode for kind in found.kinds if kind.kind in ("B", "BW", "W")} <= {None}
    assert {kind.mode for kind in found.kinds if kind.kind == "O"} > {"offload"}
    simulation = simulate(schedule.problem, schedule.orders)
    again = retimed(find_precedences(schedule), {op: s.duration_us for op, s in planned_spans(schedule).items()})
    assert again == {op: Span(simulation.start_us[k], simulation.end_us[k]) for op, k in simulation.index.items()}


def test_only_a_message_that_was_waited_for_shows_its_time() -> None:
    data = trace_data(pair())
    users = {a["microbatch"]: a for a in data["devices"][1]["actions"] if a["action"] == "F"}
    sends = {a["microbatch"]: a for a in data["devices"][0]["actions"] if a["action"] == "SEND_F"}
    for i, user in users.items():
        sends[i].update(turn_us=user["turn_us"] - 1.0, start_us=user["turn_us"] - 1.0, end_us=user["turn_us"])
    for i in (1, 2, 3):  # the send begins 3, 4, 5 us before the op that was waiting for it
        users[i].update(turn_us=users[i]["start_us"] - 2.0 - i)
        sends[i].update(turn_us=users[i]["turn_us"], start_us=users[i]["turn_us"], end_us=users[i]["turn_us"])
    transfer = next(t for t in compare(Trace.from_data(data)).transfers if t.direction == "F")
    assert (transfer.boundary, transfer.messages, transfer.timed, transfer.planned_us) == (0, 4, 3, 1)
    assert transfer.median_us == 4.0


def unequal_schedule() -> Schedule:
    """1F1B over slices and microbatches whose times and transfers differ."""
    factors = [{"time": 1, "transfer": 1}, {"time": 3, "transfer": 4}, {"time": 2, "transfer": 2}]
    slices = {"count": 2, "factors": {"forward": [1, 2], "transfer": [1, 0.5]}}
    return solve(unequal(2, 3, microbatch_factors=factors, slices=slices, transfer_us=8), "seq1f1b")


def test_transfers_are_those_of_each_microbatch_and_slice() -> None:
    schedule = unequal_schedule()
    planned = planned_spans(schedule)
    again = retimed(find_precedences(schedule), {op: span.duration_us for op, span in planned.items()})
    assert again == planned
    found = compare(trace_of(schedule))
    assert found.path.gap_difference_us == 0.0
    forward = next(transfer for transfer in found.transfers if transfer.direction == "F")
    assert (forward.messages, forward.planned_us) == (6, 12.0)  # the median of 8, 4, 32, 16, 16 and 8
    data = trace_data(schedule)
    for user in data["devices"][1]["actions"]:
        if user["action"] == "F":  # one waits for its message, and the others' are there before
            user["turn_us"] = 0.0 if user["microbatch"] == 2 else user["start_us"]
    forward = next(transfer for transfer in compare(Trace.from_data(data)).transfers if transfer.direction == "F")
    assert (forward.timed, forward.planned_us) == (1, 32.0)


def test_units_that_differ_are_re_timed_by_the_ratio_to_their_plan() -> None:
    """Every op takes half as long again, one is disturbed: each is as long as its own plan says, not as its median."""
    schedule = unequal_schedule()
    turns = one_after_the_other(schedule)
    found = compare(trace_of(schedule, turns, processes=False))
    assert (found.basis, found.step_us) == ("re-timed", schedule.value_us)
    slow = {op: Span(1.5 * s.start_us, 1.5 * s.end_us) for op, s in turns.items()}
    last = max(slow, key=lambda op: slow[op].end_us)
    slow[last] = Span(slow[last].start_us, slow[last].end_us + 500.0)
    found = compare(trace_of(schedule, slow, processes=False))
    planned = planned_spans(schedule)
    assert all(s.duration_us == pytest.approx(1.5 * planned[op].duration_us) for op, s in found.spans.items())


def test_a_plan_for_another_machine_does_not_fit() -> None:
    schedule = pair()
    times = {op: Span(100 * span.start_us, 100 * span.end_us) for op, span in planned_spans(schedule).items()}
    found = compare(trace_of(schedule, times))
    assert found.work_ratio == pytest.approx(100.0)
    assert not found.plan_fits


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, Random]:
    """Random schedules of random problems, budgets aside."""
    data = draw(problems()).to_data()
    free = {"devices": [{"memory_bytes": None}] * len(data["devices"]), "host_memory_bytes": None}
    problem = Problem.from_data(data | free | {"objective": "makespan"})
    rng = Random(draw(st.integers(0, 2**16)))
    return build_schedule(problem, random_orders(problem, rng), 0.0, "random", 0.0), rng


@settings(deadline=None)  # the simulator's kernel is compiled at its first call
@given(schedules())
def test_planned_durations_give_the_simulators_times(drawn: tuple[Schedule, Random]) -> None:
    schedule, _ = drawn
    planned = planned_spans(schedule)
    again = retimed(find_precedences(schedule), {op: span.duration_us for op, span in planned.items()})
    simulation = simulate(schedule.problem, schedule.orders)
    for op, k in simulation.index.items():
        assert again[op] == pytest.approx((simulation.start_us[k], simulation.end_us[k]))


@settings(deadline=None)
@given(schedules())
def test_any_durations_give_the_times_of_an_independent_executor(drawn: tuple[Schedule, Random]) -> None:
    schedule, rng = drawn
    duration_us = {op: float(rng.randint(0, 20)) for op in planned_spans(schedule)}
    executed = execute(schedule.problem, schedule.orders, duration_us)
    assert retimed(find_precedences(schedule), duration_us) == executed


@settings(deadline=None)
@given(schedules())
def test_the_deciding_path_is_unbroken_and_as_long_as_the_step(drawn: tuple[Schedule, Random]) -> None:
    schedule, rng = drawn
    needs = find_precedences(schedule)
    spans = retimed(needs, {op: float(rng.randint(0, 20)) for op in needs})
    path = deciding_path(needs, spans)
    assert all(step.gap_us == step.planned_gap_us for step in path)
    length = sum(step.gap_us + spans[step.op].duration_us for step in path)
    assert length == max(span.end_us for span in spans.values())
    for before, step in pairwise(path):
        assert before.op in [need.op for need in needs[step.op]]


@settings(deadline=None)
@given(schedules(), st.sampled_from(["makespan", "device_span"]))
def test_the_verifier_finds_the_same_causes(drawn: tuple[Schedule, Random], objective: str) -> None:
    problem = drawn[0].problem.model_copy(update={"objective": objective})
    schedule = build_schedule(problem, drawn[0].orders, 0.0, "random", 0.0)
    spans, precedences, causes = planned_spans(schedule), find_precedences(schedule), find_causes(schedule)
    ops, orders = [*causes.ops], schedule.orders
    found = {(ops[k], ops[before]) for k, before in zip(*causes.needs, strict=True)}
    streams = (*orders.channels, *(stream for device in orders.devices for stream in device.streams()))
    found |= {(op, before) for ops_of in streams for before, op in pairwise(ops_of)}
    assert found == {(op, need.op) for op, needs in precedences.items() for need in needs}
    for op, k, delay_us in zip(ops, causes.starts_after.tolist(), causes.delay_us.tolist(), strict=True):
        met_us = max((spans[need.op].end_us + need.delay_us for need in precedences[op]), default=-1.0)
        assert (k >= 0) == (met_us == pytest.approx(spans[op].start_us))
        if k >= 0:
            assert Need(ops[k], delay_us) in precedences[op]
            assert spans[ops[k]].end_us + delay_us == pytest.approx(spans[op].start_us)
    path = [ops[k] for k in causes.critical_path]
    assert path[:-1] == [ops[causes.starts_after[ops.index(op)]] for op in path[1:]]
    device = schedule.devices[schedule.problem.stages[path[-1].stage].device]
    begin_us = 0.0 if objective == "makespan" else device.compute.starts[0]
    assert spans[path[-1]].end_us - begin_us == pytest.approx(schedule.value_us)


def test_a_plan_that_cannot_run_is_named() -> None:
    """The ops of a trace are those of its plan, whose orders nobody has judged yet."""
    plan = build_schedule(
        uniform(1, 1), Orders.of_compute([[Op(kind, 0, 0) for kind in "FBW"]]), 0.0, "by hand", 0.0
    ).to_data()
    plan["devices"][0]["compute"][0]["waits"] = ["W0.0"]
    with pytest.raises(DeadlockError, match=r"F0\.0.*B0\.0.*W0\.0|W0\.0.*F0\.0"):
        find_precedences(Schedule.from_data(plan))
    plan["devices"][0]["compute"][0]["waits"] = ["O0.0"]
    with pytest.raises(OrderError, match=r"F0\.0 waits for O0\.0, which is not in the schedule"):
        find_precedences(Schedule.from_data(plan))
