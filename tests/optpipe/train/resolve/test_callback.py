"""Schedules that change while a model trains: never to a worse one, and without a trace in the numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from instances import uniform
from optpipe.compile.program import Action
from optpipe.errors import InputError, NoSolutionError, TrainingError
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.profile.measured import Measured
from optpipe.profile.ops import Spread
from optpipe.runtime.recorder import HostRecorder, Timing
from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, OnlineConfig, OptimizerConfig, TrainingConfig, TrainingResult, train
from optpipe.train.lengths import SizeCosts, Sizes
from optpipe.train.model import Model
from optpipe.train.resolve.callback import (
    FIRST_STEPS,
    STEPS_AFTER,
    Choice,
    ResolveCallback,
    Trial,
    choose,
    drift,
    op_times,
    retimed,
    size_costs,
)
from optpipe.train.resolve.initial import InitialSchedule, Setting
from optpipe.train.result import Events
from optpipe.train.tasks.base import Task
from optpipe.train.update import StepOutcome
from optpipe.worst_case_memory import worst_case_peak_bytes
from solver.build import build_schedule
from solver.microbatch_orders import in_order, with_own_numbers
from solver.published.one_stage import one_f_one_b
from solver.solve import solve
from tests.optpipe.train.resolve.measured import BEFORE, measured, spread
from tests.optpipe.train.resolve.solvers import Scripted
from tests.recomputing import recomputing
from tests.unequal import factor_rows

MODEL = ModelConfig("tiny", dtype="float64", microbatch_size=1, sequence=8)
STEPS = 14
REFERENCE = Sizes(16, 2)
ONLINE = OnlineConfig("online", rounds=1, first_step=1, record_steps=1, every_steps=1000, least_gain=0)


def _given(method: str) -> Schedule:
    return solve(uniform(2, 6), method)


def _config(schedule: Schedule | None, online: OnlineConfig = ONLINE) -> TrainingConfig:
    return TrainingConfig(schedule, MODEL, OptimizerConfig(clip_norm=1.0), online=online, steps=STEPS, device="cpu")


def _kinds(result: TrainingResult) -> list[str]:
    return [event.kind for event in result.events]


@pytest.fixture(scope="module")
def plain_losses() -> tuple[float, ...]:
    return train(replace(_config(_given("gpipe")), online=OnlineConfig())).losses


def test_a_better_schedule_is_taken_and_losses_stay_what_they_were(plain_losses: tuple[float, ...]) -> None:
    result = train(_config(_given("gpipe")), None, Scripted(["zb-h1"]))
    assert _kinds(result)[:4] == ["measured", "timed", "solving", "swapped"]
    assert result.schedule is not None
    assert result.schedule.method == "zb-h1"
    assert result.losses == pytest.approx(plain_losses, rel=1e-12)


def test_where_nobody_says_otherwise_the_budget_is_what_the_given_schedule_takes() -> None:
    given, solver = _given("1f1b"), Scripted([None])
    train(_config(given), None, solver)
    [problem] = solver.problems
    assert [device.memory_bytes for device in problem.devices] == [
        device.peak_bytes_any_timing for device in solve(problem, "1f1b").devices
    ]


RECOMPUTING = replace(ONLINE, modes="full", memory_bytes=10**9)


def _one_after_another() -> Schedule:
    """One microbatch at a time, recomputed inside its backward: whatever ops take, any overlap is faster."""
    problem = recomputing(2, 6)
    orders = Orders(
        [DeviceOrders([Op(kind, s, i) for i in range(6) for kind in ("F", "CBW")]) for s in range(2)],
        modes=np.ones((2, 6), np.int64),
    )
    return build_schedule(problem, orders, 0.0, "by hand", 0.0)


def test_schedules_that_recompute_are_left_and_taken_while_training(plain_losses: tuple[float, ...]) -> None:
    """From one that recomputes to a faster one that does too; the mode `full` is of the measured stages."""
    solver = Scripted(["1f1b-recompute"])
    result = train(_config(_one_after_another(), RECOMPUTING), None, solver)
    assert _kinds(result)[:4] == ["measured", "timed", "solving", "swapped"], result.events
    assert result.schedule is not None
    assert result.schedule.method == "1f1b-recompute"
    assert result.schedule.mode_names == ["full"]
    assert result.losses == pytest.approx(plain_losses, rel=1e-12)
    [problem] = solver.problems
    for stage in problem.stages:
        assert [mode.name for mode in stage.modes] == ["full"]
        assert stage.offload is None, "nobody asked for it"


def test_the_budget_of_a_given_schedule_that_recomputes_is_what_it_takes() -> None:
    solver = Scripted([None])
    train(_config(_one_after_another(), replace(RECOMPUTING, memory_bytes=None)), None, solver)
    [problem] = solver.problems
    orders = _one_after_another().orders_in(problem)
    peaks = [worst_case_peak_bytes(problem, device.streams(), orders.waits, orders.modes) for device in orders.devices]
    assert [device.memory_bytes for device in problem.devices] == peaks


def test_a_mode_that_the_measured_stages_lack_is_named() -> None:
    problem = _one_after_another().problem
    without = Problem.from_data(problem.to_data() | {"stages": [{**problem.stages[0].to_data(), "modes": []}] * 2})
    with pytest.raises(InputError, match=r"stages\[0\]\.modes has no mode 'full', in which"):
        _one_after_another().orders_in(without)


def test_a_mode_that_nobody_can_measure_is_refused() -> None:
    with pytest.raises(InputError, match=r"modes has 'ful', but must be offload, offload-bf16, "):
        replace(ONLINE, modes="offload,ful")


def test_a_worse_schedule_is_not_taken(plain_losses: tuple[float, ...]) -> None:
    result = train(_config(_given("zb-h1"), replace(ONLINE, memory_bytes=10**9)), None, Scripted(["gpipe"]))
    assert _kinds(result) == ["measured", "timed", "solving", "kept"]
    assert result.schedule is not None
    assert result.schedule.method == "zb-h1"
    assert result.losses == pytest.approx(plain_losses, rel=1e-12)


@pytest.mark.parametrize("answer", [None, "fails"])
def test_training_goes_on_where_a_search_finds_nothing(answer: str | None) -> None:
    result = train(_config(_given("gpipe")), None, Scripted([answer]))
    assert _kinds(result)[-1] == "kept"
    assert "training goes on" in result.events[-1].text
    assert len(result.losses) == STEPS


def test_a_search_that_is_not_over_at_the_end_is_ended() -> None:
    solver = Scripted(["zb-h1"])
    endless = solver.begin

    def begin(*arguments: object) -> object:
        found = endless(*arguments)  # type: ignore[arg-type]
        found.polls = 10**6
        return found

    solver.begin = begin  # type: ignore[method-assign, assignment]
    train(_config(_given("gpipe")), None, solver)
    assert solver.searches[0].cancelled


def test_without_a_schedule_training_begins_with_one_in_milliseconds() -> None:
    online = replace(ONLINE, devices=2, placement="v", microbatches=4)
    result = train(_config(None, online), None, Scripted(["zb-v"]))
    assert _kinds(result)[:4] == ["measured", "found", "timed", "solving"]
    assert "ada-offload" in result.events[1].text
    assert result.schedule is not None
    assert [stage.device for stage in result.schedule.problem.stages] == [0, 1, 1, 0]
    assert result.schedule.problem.microbatches == 4


def test_solving_first_trains_with_what_was_found() -> None:
    online = replace(ONLINE, mode="first", devices=2, microbatches=4)
    result = train(_config(None, online), None, Scripted(["zb-h1"]))
    assert _kinds(result) == ["measured", "found"]
    assert result.schedule is not None
    assert result.schedule.method == "zb-h1"
    assert len(result.losses) == STEPS


def test_ops_that_take_longer_than_before_are_solved_for_anew() -> None:
    """Any change counts here, and no two timings are equal."""
    config = replace(_config(_given("gpipe"), replace(ONLINE, every_steps=4, drift=1e-9)), steps=30)
    solver = Scripted(["zb-h1"] * 8)
    train(config, None, solver)
    assert len(solver.problems) > 1


def test_ops_that_take_about_as_long_are_not() -> None:
    online = replace(ONLINE, every_steps=4, drift=1e9)
    solver = Scripted(["zb-h1"])
    result = train(_config(_given("gpipe"), online), None, solver)
    assert len(solver.problems) == 1
    assert any("too little to solve anew" in event.text for event in result.events)


def test_memory_that_weights_alone_exceed_is_refused() -> None:
    with pytest.raises(InputError, match="Adam"):
        train(_config(None, replace(ONLINE, devices=2, memory_bytes=1000)), None, Scripted([]))


def test_memory_that_is_too_small_for_activations_is_named_with_what_would_do() -> None:
    online = replace(ONLINE, mode="first", devices=2, microbatches=4)
    with pytest.raises(NoSolutionError, match=r"memory is 661 KiB a device.*Maybe [\d,]+ bytes") as refused:
        train(_config(None, replace(online, memory_bytes=677_000)), None, Scripted(["zb-h1"]))
    [needed] = re.findall(r"Maybe ([\d,]+) bytes", str(refused.value))
    online = replace(online, memory_bytes=int(needed.replace(",", "")))
    assert len(train(_config(None, online), None, Scripted([None])).losses) == STEPS


def test_messages_that_wait_for_their_ops_are_within_the_memory_given() -> None:
    """The largest memory with which the first answer must be thrown away: one byte less than it takes with messages."""
    online = replace(ONLINE, mode="first", devices=2, microbatches=4, memory_bytes=10**9)
    config = _config(None, online)
    free = train(replace(config, steps=1, check=True), None, Scripted([None], first="zb-h1"))
    assert free.check is not None
    problem_bytes = [10**9 - (device.memory_bytes or 0) for device in (free.schedule or _given("1f1b")).problem.devices]
    taken = [held + device.planned_peak_bytes for held, device in zip(problem_bytes, free.check.devices, strict=True)]
    memory = max(taken) - 1
    tight = train(
        replace(config, steps=1, check=True, online=replace(online, memory_bytes=memory)), None, Scripted([None] * 9)
    )
    assert tight.check is not None
    assert all(
        held + device.peak_bytes <= memory for held, device in zip(problem_bytes, tight.check.devices, strict=True)
    )


def test_a_schedule_cannot_be_sought_without_a_solver() -> None:
    with pytest.raises(TrainingError, match="no solver was given"):
        train(_config(None, replace(ONLINE, mode="first", devices=2)))


@pytest.mark.parametrize(
    ("in_use_us", "found_us", "least_gain", "better"),
    [(100, 98, 0.01, True), (100, 99.5, 0.01, False), (100, 100, 0.0, False), (100, 101, 0.0, False)],
)
def test_only_what_saves_enough_is_better(in_use_us: float, found_us: float, least_gain: float, better: bool) -> None:
    assert Choice(in_use_us, found_us, least_gain).better is better


def test_both_are_timed_with_the_newest_costs() -> None:
    problem = uniform(4, 8)
    in_use, found = solve(problem, "1f1b"), solve(problem, "zb-h1")
    slower = Problem.from_data(
        problem.to_data()
        | {"stages": [stage.to_data() | {"forward_us": 3 * stage.forward_us} for stage in problem.stages]}
    )
    choice = choose(slower, in_use, found, 0.01)
    assert choice.in_use_us == solve(slower, "1f1b").value_us > in_use.value_us
    assert choice.found_us == solve(slower, "zb-h1").value_us
    assert choice.better


def _trial(before: list[float], after: list[float]) -> Trial:
    trial = Trial(before)
    for seconds in after:
        trial.add(seconds)
    return trial


def test_a_trial_waits_for_enough_steps() -> None:
    assert not _trial([1.0] * 9, [1.0] * (FIRST_STEPS + STEPS_AFTER - 1)).over
    assert _trial([1.0] * 9, [1.0] * (FIRST_STEPS + STEPS_AFTER)).over


def test_the_first_steps_after_a_change_do_not_count() -> None:
    trial = _trial([1.0, 1.1, 0.9, 1.0, 1.05], [9.0] * FIRST_STEPS + [0.8] * STEPS_AFTER)
    assert not trial.worse
    assert trial.figures == "steps take 0.800 s after the change, 1.000 s before it"


def test_longer_steps_are_worse_beyond_their_noise() -> None:
    before = [1.0, 1.1, 0.9, 1.0, 1.2, 1.05]
    assert _trial(before, [0.0] * FIRST_STEPS + [1.5] * STEPS_AFTER).worse
    assert not _trial(before, [0.0] * FIRST_STEPS + [1.06] * STEPS_AFTER).worse


def test_without_steps_before_there_is_nothing_to_compare() -> None:
    trial = _trial([], [1.0] * (FIRST_STEPS + STEPS_AFTER))
    assert not trial.worse
    assert trial.figures == "steps take 1.000 s after the change"


def test_too_few_steps_before_condemn_nothing() -> None:
    assert not _trial([1.0], [0.0] * FIRST_STEPS + [1.5] * STEPS_AFTER).worse


def _timing(kind: str, stage: int, microbatch: int, us: float) -> Timing:
    return Timing(stage, Action(kind, stage, microbatch), 0, 1000, 1000 + int(us * 1000))


def _alone(value: Any) -> list[Any]:
    return [value]


def test_each_kind_of_a_stage_gets_its_median_from_when_it_could_begin() -> None:
    timings = [_timing("F", 0, i, us) for i, us in enumerate((1.0, 5.0, 2.0))] + [_timing("W", 1, 0, 7.0)]
    found = op_times(timings, _alone)
    assert found[0]["F"].median_us == 2.0
    assert found[0]["F"].count == 3
    assert found[1]["W"].median_us == 7.0


def test_copies_of_what_a_recomputed_microbatch_keeps_are_timed_apart() -> None:
    timings = [_timing(kind, 0, i, us) for kind, i, us in (("O", 0, 9.0), ("O", 1, 1.0), ("C", 1, 4.0))]
    found = op_times(timings, _alone, {(0, 1): "full+offload"})[0]
    assert {kind: spread.median_us for kind, spread in found.items()} == {"O": 9.0, "O full": 1.0, "C full": 4.0}


def test_messages_are_not_ops() -> None:
    message = Timing(0, Action("SEND_F", 0, 0, peer=1), 0, 0, 9)
    assert op_times([message], _alone) == {}


def test_the_slowest_replica_counts() -> None:
    other = op_times([_timing("F", 0, 0, 30.0)], _alone)
    slow = {"0": {"F": {"median_us": 30.0, "lower_us": 30.0, "upper_us": 30.0, "count": 1}}}
    for found in (lambda mine: [mine, slow], lambda mine: [slow, mine]):
        assert op_times([_timing("F", 0, 0, 20.0)], found) == other


def test_timed_kinds_replace_and_others_are_scaled_as_they() -> None:
    times = retimed(measured(), {0: {"F": spread(20.0), "BW": spread(52.0)}}).stages[0].times
    assert {kind: spread.median_us for kind, spread in times.items()} == {
        kind: pytest.approx(2 * us) for kind, us in BEFORE.items()
    }


def _timings(sizes: list[list[Sizes]]) -> list[Timing]:
    """F takes 3 us an element, B 1 us for each of the squares and 100 us, W nothing that depends on sizes."""
    found = []
    for of_step in sizes:
        for place, size in enumerate(of_step):
            times_us = {"F": 3 * size.elements, "B": size.squares + 100, "W": 50}
            for kind, us in times_us.items():
                found.append(Timing(0, Action(kind, 0, place), 0, 0, round(1000 * us)))
    return found


LENGTHS = [[Sizes(2 * length, 2) for length in lengths] for lengths in ((8, 3, 5, 16), (4, 9, 2, 7))]


def test_times_are_fitted_to_the_sizes_of_the_microbatches_in_each_place() -> None:
    costs = size_costs(_timings(LENGTHS), LENGTHS, lambda value: [value])
    assert costs is not None
    parts = {name: np.array(own) / sum(own) for name, own in costs.times.items()}
    of_total = np.array([150, 3, 1]) / 154
    expected = {"forward": [0, 1, 0], "backward_input": np.array([100, 0, 1]) / 101, "backward_weight": [1, 0, 0]}
    assert parts == {
        name: pytest.approx(own, abs=1e-6)
        for name, own in (expected | {"recompute": of_total, "time": of_total}).items()
    }
    assert size_costs(_timings([LENGTHS[0][:1]]), [LENGTHS[0][:1]], lambda value: [value]) is None


def test_times_of_different_sizes_are_those_of_the_reference() -> None:
    """Here times are in proportion to elements, so that all microbatches agree on what the reference takes."""
    timings = [timing for timing in _timings(LENGTHS) if timing.action.kind == "F"]
    factors = [SizeCosts().factors(sizes, REFERENCE) for sizes in LENGTHS]
    assert op_times(timings, lambda value: [value], factors=factors)[0]["F"] == Spread(48.0, 48.0, 48.0, 8)


def test_alike_microbatches_keep_the_order_that_was_chosen_for_unequal_ones() -> None:
    alike = SETTING.problem(measured())
    factors = [{"time": 1 + i} for i in range(alike.microbatches)]
    data = alike.to_data() | {"microbatch_factors": factors, "microbatch_order": "free"}
    unequal, order = Problem.from_data(data), list(range(alike.microbatches))[::-1]
    orders = with_own_numbers(unequal, one_f_one_b(in_order(unequal, order)), order)
    schedule = build_schedule(unequal, orders, 0.0, "by hand", 0.0)
    assert choose(alike, schedule, solve(alike, "1f1b"), 0.0).gain == 0


VARYING = replace(MODEL, lengths="varying", sequence=24)


def test_choices_put_unequal_microbatches_where_they_are_best() -> None:
    factors = factor_rows([1, 4, 1, 4])
    problem = replace(SETTING, factors=factors).problem(measured())
    schedule = solve(problem, "1f1b")
    choice = choose(problem, schedule, schedule, 0.0)
    assert choice.in_use_us == choice.found_us < schedule.value_us


@pytest.mark.parametrize("given", ["gpipe", None])
def test_lengths_that_vary_are_measured_and_planned_for_while_training(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are those of a run that changes nothing; the new schedule is for unequal microbatches in their order."""
    # Times of a busy machine may say anything.
    monkeypatch.setattr("optpipe.train.resolve.callback.choose", lambda *_: Choice(2.0, 1.0, 0.0))
    online = ONLINE if given else replace(ONLINE, devices=2, microbatches=6)
    schedule = _given(given) if given else None
    solver = Scripted(["zb-h1"], first="gpipe")
    config = replace(_config(schedule, online), model=VARYING)
    result = train(config, None, solver)
    assert _kinds(result)[:2] == ["measured", "timed" if given else "found"]
    assert "swapped" in _kinds(result), result.events
    plain = train(replace(config, schedule=_given("gpipe"), online=OnlineConfig()))
    assert result.losses == pytest.approx(plain.losses, rel=1e-9)
    [problem] = solver.problems
    assert problem.microbatch_order == "free"
    assert problem.microbatch_factors is not None
    assert len({entry.bytes for entry in problem.microbatch_factors}) > 1
    assert max(entry.bytes for entry in problem.microbatch_factors) <= 24 / 4


def test_a_stage_that_was_not_timed_stays() -> None:
    before = measured()
    assert retimed(before, {0: {"F": spread(20.0)}}).stages[1] == before.stages[1]


def _problem(**changes: float) -> Problem:
    data = measured().problem(4).to_data()
    data["stages"][1] |= changes
    return Problem.from_data(data)


def test_drift_is_of_the_device_that_changed_most() -> None:
    total = BEFORE["F"] + BEFORE["B"] + BEFORE["W"] + BEFORE["O"] + BEFORE["R"]
    assert drift(_problem(), _problem()) == 0
    assert drift(_problem(), _problem(forward_us=14.0)) == pytest.approx(4 / total)
    assert drift(_problem(), _problem(forward_us=14.0, backward_input_us=16.0)) == pytest.approx(8 / total)


SETTING = Setting(placement=(0, 1), microbatches=4)


@dataclass
class _TwoProcesses:
    """Rank 0 of two, without the other."""

    world: int = 2
    rank: int = 0

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


@dataclass
class _Training:
    """Stand-in for the parts of a model that the boundary uses."""

    schedule: Schedule
    step_number: int = 0
    hardware: torch.device = field(default_factory=lambda: torch.device("cpu"))
    launch: _TwoProcesses = field(default_factory=_TwoProcesses)
    program: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(modes={}))
    swaps: list[str] = field(default_factory=list)
    shapes: None = None
    reference: Sizes = REFERENCE
    recorded_sizes: list[list[Sizes]] = field(default_factory=list)

    def swap(self, schedule: Schedule, _reference: Sizes) -> None:
        self.swaps.append(schedule.method)
        self.schedule = schedule


def _first(training: _Training, found: Measured) -> InitialSchedule:
    """First measurement, as if made before; the task has done its part by then."""
    return InitialSchedule(training.schedule, SETTING, found, cast(Task, None), REFERENCE)


def _outcome(step: int, seconds: float) -> StepOutcome:
    return StepOutcome(step, 1.0, 1.0, 0.1, False, False, False, seconds)


def _trained(seconds_after: float) -> tuple[_Training, Events]:
    """Ten steps of a second with gpipe, then zb-h1 is found, whose steps take so long."""
    found = measured()
    training = _Training(solve(SETTING.problem(found), "gpipe"))
    events, config = Events(leads=False), OnlineConfig("online", first_step=8, record_steps=1, every_steps=1000)
    online = ResolveCallback(config, cast(Model, training), _first(training, found), Scripted(["zb-h1"]), events)
    for step in range(30):
        if online.is_due(step) or online.requests():
            online.on_step_boundary(step)
        recorder = online.recorder(step)
        if isinstance(recorder, HostRecorder):
            recorder.begin(0, Action("F", 0, 0))
            recorder.end()
        online.done(_outcome(step, seconds_after if training.swaps[-1:] == ["zb-h1"] else 1.0 + step % 3 / 100))
    return training, events


def test_longer_steps_bring_the_schedule_before_back() -> None:
    training, events = _trained(1.5)
    assert training.swaps == ["zb-h1", "gpipe"]
    assert [event.kind for event in events.all] == ["timed", "solving", "swapped", "back"]
    swapped, back = (event.step for event in events.all if event.kind in ("swapped", "back"))
    assert back - swapped >= FIRST_STEPS + STEPS_AFTER


def test_shorter_steps_keep_it() -> None:
    training, events = _trained(0.9)
    assert training.swaps == ["zb-h1"]
    assert [event.kind for event in events.all] == ["timed", "solving", "swapped", "kept"]


def test_what_changes_during_a_search_is_solved_for_after_it() -> None:
    """A second timing, three times as long, while the first search runs."""
    found, solver = measured(), Scripted(["gpipe", "zb-h1"])
    training = _Training(solve(SETTING.problem(found), "gpipe"))
    config = OnlineConfig("online", first_step=0, record_steps=1, every_steps=4)
    events = Events(leads=False)
    online = ResolveCallback(config, cast(Model, training), _first(training, found), solver, events)
    for step in range(16):
        if online.is_due(step) or online.requests():
            online.on_step_boundary(step)
        recorder = online.recorder(step)
        if isinstance(recorder, HostRecorder):
            _record(recorder, 1.0 if step == 0 else 3.0)
        if step == 1:
            solver.searches[0].polls = 6
        online.done(_outcome(step, 1.0))
    assert [problem.stages[0].forward_us for problem in solver.problems] == [10.0, 30.0]
    kinds = [event.kind for event in events.all]
    assert kinds[:5] == ["timed", "solving", "timed", "kept", "solving"]


def _record(recorder: HostRecorder, times: float) -> None:
    """Every op of stage 0 took so many times what was measured before."""
    recorder._timings += [Timing(0, Action(kind, 0, 0), 0, 0, int(1000 * us * times)) for kind, us in BEFORE.items()]
