"""Beside training: time ops in some steps, solve for what they cost, change to a better schedule between two steps.

Every process times its own ops. Rank 0 alone asks the solver, whose search runs in a process of its own; what it finds
goes to all, who change together. Nobody waits for a search.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from time import perf_counter
from typing import Any

from optpipe.problem import Problem
from optpipe.runtime.trace import HostRecorder, Recorder
from optpipe.runtime.trace_cuda import CudaRecorder
from optpipe.schedule import Schedule
from optpipe.train.boundary import Boundary
from optpipe.train.config import OnlineConfig
from optpipe.train.model import Model
from optpipe.train.online.choice import STEPS_BEFORE, Trial, choose
from optpipe.train.online.costs import drift, op_times, retimed
from optpipe.train.online.events import Events
from optpipe.train.online.first import First
from optpipe.train.online.search import Search
from optpipe.train.online.solver import Solver
from optpipe.train.updates.outcome import StepOutcome


class Online(Boundary):
    """The loop around training, from the model's step on. `solver` is rank 0's, None elsewhere."""

    def __init__(self, config: OnlineConfig, model: Model, first: First, solver: Solver | None, events: Events) -> None:
        self._config, self._model, self._events = config, model, events
        self._search = Search(solver, config) if solver else None
        self._setting, self._measured = first.setting, first.measured
        self._problem = first.setting.problem(first.measured)
        self._solved_for: Problem | None = None
        self._stale = False
        self._begin = model.step_number + config.first_step
        self._recorder: HostRecorder | CudaRecorder | None = None
        self._recorded: dict[int, float] = {}
        self._seconds: deque[float] = deque(maxlen=STEPS_BEFORE)
        self._trial: Trial | None = None
        self._before = model.schedule

    def recorder(self, step: int) -> Recorder | None:
        """Times the ops of a few steps in every so many."""
        place = (step - self._begin) % self._config.every_steps
        if step < self._begin or place >= self._config.record_steps:
            return None
        if self._recorder is None:
            self._recorder = CudaRecorder() if self._model.hardware.type == "cuda" else HostRecorder()
        self._recorded[step] = 0.0
        return self._recorder

    def due(self, step: int) -> bool:
        """Whether the steps just done were the last to be timed together."""
        since = step - self._begin - self._config.record_steps
        return since >= 0 and since % self._config.every_steps == 0

    def asks(self) -> bool:
        """Whether rank 0 has something for all: a schedule to change to, or the one before to go back to."""
        if self._trial is not None:
            return self._trial.over
        return self._search is not None and self._search.over

    def act(self, step: int) -> None:
        """Learn from the steps that were timed; change the schedule where rank 0 says so; have solved what changed."""
        if self._recorder is not None and self.due(step):
            self._learn(step, self._recorder)
            self._recorder, self._recorded = None, {}
        self._follow(step, self._model.launch.broadcast(self._offer() if self._model.launch.rank == 0 else None))
        if self._stale and self._trial is None and self._search is not None and not self._search.running:
            self._solve(step, self._search)

    def done(self, outcome: StepOutcome) -> None:
        """Remember what a step took, unless it was timed op by op."""
        if outcome.step in self._recorded:
            self._recorded[outcome.step] = outcome.seconds
        elif self._trial is not None:
            self._trial.add(outcome.seconds)
        else:
            self._seconds.append(outcome.seconds)

    def end(self) -> None:
        """Nothing is searched for any more."""
        if self._search is not None:
            self._search.cancel()

    def _learn(self, step: int, recorder: HostRecorder | CudaRecorder) -> None:
        """Put the times of the steps into the problem. It is stale if it is not any more what was solved."""
        begin = perf_counter()
        self._measured = retimed(self._measured, op_times(recorder.timings(), self._model.launch.gather))
        self._problem, before = self._setting.problem(self._measured), self._solved_for or self._problem
        changed = drift(before, self._problem)
        self._stale = self._solved_for is None or changed > self._config.drift
        seconds = perf_counter() - begin
        text = f"{self._cost()}, gathered in {seconds:.3f} s; {changed:.1%} from what was solved"
        self._events.tell(step, "timed", text if self._stale else f"{text}, too little to solve anew", seconds)

    def _solve(self, step: int, search: Search) -> None:
        """Rank 0: begin a search for the newest times, within the memory that messages leave."""
        self._problem = self._setting.problem(self._measured)
        search.begin(self._problem, self._model.schedule)
        self._solved_for, self._stale = self._problem, False
        self._events.tell(step, "solving", f"solving beside the training, up to {self._config.time_limit_s:g} s")

    def _cost(self) -> str:
        """What the timing of ops took, in words."""
        timed = f"timed every op in {len(self._recorded)} steps of {median(self._recorded.values()):.3f} s"
        return f"{timed} ({median(self._seconds):.3f} s when not)" if self._seconds else timed

    def _offer(self) -> dict[str, Any] | None:
        """Rank 0: what all are to do; None: nothing."""
        if self._trial is not None:
            return self._verdict(self._trial) if self._trial.over else None
        if self._search is None or not self._search.over:
            return None
        found = self._search.take()
        if found is None:
            return {"kind": "kept", "text": f"training goes on as it is: {self._search.why_nothing}"}
        if any(excess := self._setting.excess_bytes(found, self._measured)):
            self._setting, self._stale = self._setting.reserving(excess), True
            return {"kind": "kept", "text": f"{found.method} would take {max(excess):,} bytes too many for messages"}
        choice = choose(self._problem, self._model.schedule, found, self._config.least_gain)
        figures = f"{choice.in_use_us:,.0f} us a step predicted, {choice.found_us:,.0f} us with {found.method}"
        if not choice.better:
            least = self._config.least_gain
            return {"kind": "kept", "text": f"{figures}: {choice.gain:.2%} less, under {least:.2%}; nothing is changed"}
        text = f"{figures}, {choice.gain:.1%} less (at most {1 - found.bound_us / choice.in_use_us:.1%} is possible)"
        return {"kind": "swapped", "text": text, "schedule": found.to_data()}

    def _verdict(self, trial: Trial) -> dict[str, Any]:
        """Of a trial that is over."""
        figures = trial.figures
        if self._model.launch.world == 1:
            return {
                "kind": "kept",
                "text": f"{figures}; devices take turns in this one process, so a step is the sum of all ops",
            }
        if trial.worse:
            return {"kind": "back", "text": f"{figures}: back to the schedule before", "schedule": None}
        return {"kind": "kept", "text": f"{figures}: kept"}

    def _follow(self, step: int, order: dict[str, Any] | None) -> None:
        """Do what rank 0 says."""
        if order is None:
            return
        begin = perf_counter()
        self._trial = None
        if "schedule" in order:
            data = order["schedule"]
            new = self._before if data is None else Schedule.from_data(data)
            before = self._model.schedule
            self._model.swap(new)
            self._before = before
            self._trial = Trial(self._seconds) if order["kind"] == "swapped" else None
            self._seconds.clear()
        seconds = perf_counter() - begin
        took = f"; the change took {seconds:.3f} s" if "schedule" in order else ""
        self._events.tell(step, order["kind"], order["text"] + took, seconds)
