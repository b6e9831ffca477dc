"""A slow copy may cost time, never memory: programs on a simulated machine that knows streams and events alone.

Whatever each action and message takes, the plan's rules and waits are kept, nothing reads or writes memory that is
not there, and no device ever holds more than the plan says it may under any timing.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances.schedules import Moved, one_f_one_b, v_wave
from optpipe.compile import Program, compile_schedule
from optpipe.compile.memory import planned_peaks_bytes
from optpipe.compile.program import RECEIVES
from optpipe.kinds import KINDS
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.worst_case_memory import worst_case_peak_bytes
from solver.build import build_schedule
from tests import mode_oracle
from tests.optpipe.compile.player import Times, levels_bytes, planned_duration, play
from tests.optpipe.runtime.schedules import random_schedule
from tests.problems import problems
from tests.random_plans import precedences
from tests.recomputing import random_recomputing
from tests.sample import examples, some


@st.composite
def placed_problems(draw: st.DrawFn) -> Problem:
    """Random problems without budgets; placements as drawn, linear or interleaved, and V-shaped."""
    data = draw(problems(max_devices=3, max_stages=6)).to_data()
    count, shape = len(data["devices"]), draw(st.sampled_from(["any", "interleaved", "V"]))
    for s, stage in enumerate(data["stages"]):
        turn, place = divmod(s, count)
        if shape != "any":
            stage["device"] = count - 1 - place if shape == "V" and turn % 2 else place
    return Problem.from_data(data | {"devices": [{"memory_bytes": None}] * count, "host_memory_bytes": None})


def random_durations(program: Program, rng: Random) -> dict[Op, float]:
    """Most short, some so long that everything else has to wait, some none at all."""
    return {action.key: rng.choice((0, 1, 1, 2, 3, 100)) * rng.random() for action in program.actions()}


@given(placed_problems(), st.integers(0, 10**6))
@settings(max_examples=examples(200))
def test_whatever_things_take_the_plan_is_obeyed_within_its_memory(problem: Problem, seed: int) -> None:
    schedule = random_schedule(problem, seed)
    program = compile_schedule(schedule)
    taking = random_durations(program, Random(seed))
    times = play(program, lambda op: taking[op] if op.kind not in ("RELEASE", "PREPARE") else 0.0)
    assert_rules_and_waits_are_kept(schedule, times)
    assert_copies_find_their_memory(program, times)
    assert_messages_find_theirs(program, times)
    for d, device in enumerate(schedule.devices):
        allowed = worst_case_peak_bytes(problem, tuple(ops.ops for _, ops in device.streams()), schedule.orders.waits)
        assert max(levels_bytes(program, problem, times, d), default=0) <= allowed


@pytest.mark.parametrize("seed", some(range(60)))
def test_random_schedules_with_modes_are_obeyed_within_their_memory(seed: int) -> None:
    rng = Random(seed)
    problem, orders = random_recomputing(rng)
    schedule = build_schedule(problem, orders, 0.0, "random", 0.0)
    program = compile_schedule(schedule)
    there, last = set(orders.ops()), len(problem.stages) - 1
    assert sorted(action.key for action in program.actions() if action.kind in KINDS) == sorted(there)
    taking = random_durations(program, rng)
    times = play(program, lambda op: taking[op] if op.kind not in ("RELEASE", "PREPARE") else 0.0)
    rules = [(Op(*before), op) for op in there for before in mode_oracle.needs(op, there, last)]
    waits = [(before, op) for op, others in orders.waits.items() for before in others]
    for before, after in rules + waits:
        assert times[before][1] <= times[after][0], f"{after} began before {before} was over"
    assert_copies_find_their_memory(program, times)
    for d, device in enumerate(orders.devices):
        allowed = worst_case_peak_bytes(problem, tuple(device.streams()), orders.waits, orders.modes)
        levels = list(levels_bytes(program, problem, times, d))
        assert max(levels, default=0) <= allowed
        assert planned_peaks_bytes(program, problem, [0] * last)[d] == max(levels, default=0)


def assert_rules_and_waits_are_kept(schedule: Schedule, times: Times) -> None:
    """Channels are left to the hardware: order and waits are what an executor obeys."""
    orders = Orders(schedule.orders.devices, schedule.orders.waits)
    for before, after, _ in precedences(schedule.problem, orders):
        assert times[before][1] <= times[after][0], f"{after} began before {before} was over"


def assert_copies_find_their_memory(program: Program, times: Times) -> None:
    for s, i in program.offloaded:
        copied, released, prepared, reloaded = (times[Op(k, s, i)] for k in ("O", "RELEASE", "PREPARE", "R"))
        assert copied[1] <= released[0]
        assert prepared[1] <= reloaded[0]
    for actions, slabs in zip(program.devices, program.slabs, strict=True):
        for number in range(len(slabs)):
            users = [a for a in actions if a.kind == "O" and a.slab == number]
            for before, after in pairwise(users):
                assert times[Op("R", before.stage, before.microbatch)][1] <= times[after.key][0]


def assert_messages_find_theirs(program: Program, times: Times) -> None:
    """A receive begins when all compute actions that were issued before it are over: its memory may be theirs."""
    for actions in program.devices:
        over = 0.0
        for action in actions:
            if action.stream == "compute":
                over = times[action.key][1]
            elif action.kind in RECEIVES:
                assert times[action.key][0] >= over


def everything(stages: int) -> Moved:
    """All activations of all stages but the last, which does not offload."""
    return [(s, i) for s in range(stages - 1) for i in range(6)]


@pytest.mark.parametrize(
    "schedule",
    [one_f_one_b(4, 6), one_f_one_b(4, 6, moved=everything(4)), v_wave(3, 4), v_wave(3, 4, moved=everything(6))],
    ids=["1F1B", "1F1B, offload", "V", "V, offload"],
)
def test_at_the_planned_times_streams_and_events_cost_nothing(schedule: Schedule) -> None:
    program = compile_schedule(schedule)
    times = play(program, planned_duration(schedule.problem))
    ends = [end for op, (_, end) in times.items() if op.kind in ("F", "B", "W")]
    assert max(ends) == pytest.approx(schedule.value_us)


@pytest.mark.parametrize("moved", [[(0, 0)], everything(2)])
def test_a_machine_that_obeys_no_events_would_be_noticed(moved: Moved) -> None:
    """The assertions above can fail: without waits a copy comes back before it has left."""
    schedule = one_f_one_b(2, 6, moved=moved)
    program = compile_schedule(schedule)
    bare = tuple(tuple(a._replace(waits=()) for a in actions) for actions in program.devices)
    times = play(Program(program.microbatches, program.placement, bare, program.slabs), lambda op: 1.0)
    with pytest.raises(AssertionError):
        assert_rules_and_waits_are_kept(schedule, times)
    with pytest.raises(AssertionError):
        assert_copies_find_their_memory(program, times)
