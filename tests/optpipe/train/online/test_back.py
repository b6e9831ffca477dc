"""A schedule that was predicted to be better and is not, once it runs: the one before comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch

from optpipe.compile.actions import Action
from optpipe.profile.measured import Measured
from optpipe.runtime.trace import HostRecorder, Timing
from optpipe.schedule import Schedule
from optpipe.train.config import OnlineConfig
from optpipe.train.model import Model
from optpipe.train.online.choice import FIRST_STEPS, STEPS_AFTER
from optpipe.train.online.events import Events
from optpipe.train.online.first import First
from optpipe.train.online.online import Online
from optpipe.train.online.start import Setting
from optpipe.train.task import Task
from optpipe.train.updates.outcome import StepOutcome
from solver.portfolio import solve
from tests.optpipe.train.online.measured import BEFORE, measured
from tests.optpipe.train.online.solvers import Scripted

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
    """What of a model the boundary uses."""

    schedule: Schedule
    step_number: int = 0
    hardware: torch.device = field(default_factory=lambda: torch.device("cpu"))
    launch: _TwoProcesses = field(default_factory=_TwoProcesses)
    swaps: list[str] = field(default_factory=list)

    def swap(self, schedule: Schedule) -> None:
        self.swaps.append(schedule.method)
        self.schedule = schedule


def _first(training: _Training, found: Measured) -> First:
    """As if measured before; the task has done its part by then."""
    return First(training.schedule, SETTING, found, cast(Task, None))


def _outcome(step: int, seconds: float) -> StepOutcome:
    return StepOutcome(step, 1.0, 1.0, 0.1, False, False, False, seconds)


def _trained(seconds_after: float) -> tuple[_Training, Events]:
    """Ten steps of a second with gpipe, then zb-h1 is found, whose steps take so long."""
    found = measured()
    training = _Training(solve(SETTING.problem(found), "gpipe"))
    events, config = Events(leads=False), OnlineConfig("online", first_step=8, record_steps=1, every_steps=1000)
    online = Online(config, cast(Model, training), _first(training, found), Scripted(["zb-h1"]), events)
    for step in range(30):
        if online.due(step) or online.asks():
            online.act(step)
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
    online = Online(config, cast(Model, training), _first(training, found), solver, events)
    for step in range(16):
        if online.due(step) or online.asks():
            online.act(step)
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
