"""Re-solving callback: updated costs, background search, and switching when the prediction gains.

Every process times its own ops. Rank 0 alone asks the solver, whose search runs in a process of its own; what it finds
goes to all, who change together. Nobody waits for a search.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from optpipe.ops import KINDS
from optpipe.problem import Problem
from optpipe.profile.measured import Gather, Measured, StageFigures
from optpipe.profile.ops import Spread, spread_of
from optpipe.runtime.recorder import CudaRecorder, HostRecorder, Recorder, Timing
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.train.callback import Callback
from optpipe.train.config import OnlineConfig
from optpipe.train.model import Model
from optpipe.train.resolve.initial import InitialSchedule
from optpipe.train.resolve.search import Search, Solver
from optpipe.train.result import Events
from optpipe.train.update import StepOutcome

STEPS_BEFORE = 20
"""The last steps before a swap, against which it is judged, at most."""

FIRST_STEPS = 2
"""After a swap these do not count: host buffers take on their sizes, memory is got."""

STEPS_AFTER = 5
"""Then so many decide."""


@dataclass(frozen=True)
class Choice:
    """The step that both schedules predict with the newest times, in microseconds."""

    in_use_us: float
    found_us: float
    least_gain: float

    @property
    def gain(self) -> float:
        """The share of the step in use that the found one saves; negative if it takes longer."""
        return 1 - self.found_us / self.in_use_us if self.in_use_us else 0.0

    @property
    def better(self) -> bool:
        """Whether it saves something, and enough."""
        return self.gain > 0 and self.gain >= self.least_gain


def choose(problem: Problem, in_use: Schedule, found: Schedule, least_gain: float) -> Choice:
    """Time both schedules' orders with the costs of a problem."""
    in_use_us, found_us = (simulate(problem, schedule.orders).value_us for schedule in (in_use, found))
    return Choice(in_use_us, found_us, least_gain)


class Trial:
    """The first steps with a new schedule, against the last with the one before: seconds of each."""

    def __init__(self, before_seconds: Sequence[float]) -> None:
        self._before = list(before_seconds)[-STEPS_BEFORE:]
        self._after: list[float] = []

    def add(self, seconds: float) -> None:
        """One more step with the new schedule."""
        self._after.append(seconds)

    @property
    def over(self) -> bool:
        """Whether enough steps are known."""
        return len(self._counted) >= STEPS_AFTER

    @property
    def figures(self) -> str:
        """The medians of both, in words."""
        after = f"{median(self._counted):.3f} s after the change"
        return f"steps take {after}, {median(self._before):.3f} s before it" if self._before else f"steps take {after}"

    @property
    def worse(self) -> bool:
        """Whether steps became longer, beyond what they differed by before: more than half of the new ones take longer
        than three quarters of the old ones.
        """
        if len(self._before) < STEPS_AFTER:
            return False
        return median(self._counted) > quantiles(self._before, n=4, method="inclusive")[2]

    @property
    def _counted(self) -> list[float]:
        return self._after[FIRST_STEPS:]


OpTimes = Mapping[int, Mapping[str, Spread]]
"""By stage and kind of op."""


def op_times(timings: Iterable[Timing], gather: Gather) -> OpTimes:
    """The spread of every kind of op of every stage over all microbatches of the steps that were timed.

    Of replicas, the slowest counts, for which the others wait. Called by all processes together.
    """
    samples: dict[str, dict[str, list[float]]] = {}
    for timing in timings:
        action = timing.action
        if action.kind in KINDS:
            kinds = samples.setdefault(str(action.stage), {})
            kinds.setdefault(action.kind, []).append((timing.end_ns - timing.start_ns) / 1000)
    mine = {s: {kind: asdict(spread_of(us)) for kind, us in kinds.items()} for s, kinds in samples.items()}
    found: dict[int, dict[str, Spread]] = {}
    for part in gather(mine):
        for s, kinds in part.items():
            times = found.setdefault(int(s), {})
            for kind, data in kinds.items():
                times[kind] = max((Spread(**data), *_known(times, kind)), key=lambda spread: spread.median_us)
    return found


def retimed(measured: Measured, times: OpTimes) -> Measured:
    """The same model with the times of ops in training.

    A kind that no step had keeps its share of the stage: it is scaled as those that were timed.
    """
    return replace(measured, stages=[_retimed(f, times.get(s, {})) for s, f in enumerate(measured.stages)])


def drift(before: Problem, after: Problem) -> float:
    """How much op times have changed: of the device where most did, the changes over the times before.

    It is the sum over the device's stages and kinds of |after - before|, over the sum of before.
    """
    return max(_drift(before, after, stages) for stages in before.stages_of)


def _known(times: Mapping[str, Spread], kind: str) -> Sequence[Spread]:
    return [times[kind]] if kind in times else []


def _retimed(figures: StageFigures, times: Mapping[str, Spread]) -> StageFigures:
    timed = times.keys() & figures.times.keys()
    was = sum(figures.times[kind].median_us for kind in timed)
    scale = sum(times[kind].median_us for kind in timed) / was if was else 1.0
    others = {kind: _scaled(spread, scale) for kind, spread in figures.times.items() if kind not in timed}
    return replace(figures, times=others | {kind: times[kind] for kind in timed})


def _scaled(spread: Spread, scale: float) -> Spread:
    return Spread(spread.median_us * scale, spread.lower_us * scale, spread.upper_us * scale, spread.count)


def _drift(before: Problem, after: Problem, stages: Sequence[int]) -> float:
    pairs = [
        (before.stages[s].duration_us(kind), after.stages[s].duration_us(kind))
        for s in stages
        for kind in ("F", "B", "W", *(("O", "R") if before.stages[s].offload and after.stages[s].offload else ()))
    ]
    total = sum(was for was, _ in pairs)
    return sum(abs(now - was) for was, now in pairs) / total if total else 0.0


class ResolveCallback(Callback):
    """The loop around training, from the model's step on. `solver` is rank 0's, None elsewhere."""

    def __init__(
        self, config: OnlineConfig, model: Model, first: InitialSchedule, solver: Solver | None, events: Events
    ) -> None:
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

    def is_due(self, step: int) -> bool:
        """Whether the steps just done were the last to be timed together."""
        since = step - self._begin - self._config.record_steps
        return since >= 0 and since % self._config.every_steps == 0

    def requests(self) -> bool:
        """Whether rank 0 has something for all: a schedule to change to, or the one before to go back to."""
        if self._trial is not None:
            return self._trial.over
        return self._search is not None and self._search.over

    def on_step_boundary(self, step: int) -> None:
        """Learn from the steps that were timed; change the schedule where rank 0 says so; have solved what changed."""
        if self._recorder is not None and self.is_due(step):
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
        self._events.add(step, "timed", text if self._stale else f"{text}, too little to solve anew", seconds)

    def _solve(self, step: int, search: Search) -> None:
        """Rank 0: begin a search for the newest times, within the memory that messages leave."""
        self._problem = self._setting.problem(self._measured)
        search.begin(self._problem, self._model.schedule)
        self._solved_for, self._stale = self._problem, False
        self._events.add(step, "solving", f"solving beside the training, up to {self._config.time_limit_s:g} s")

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
        for s, stage in enumerate(self._measured.stages):
            if not stage.splits and any(op.kind in ("B", "W") and op.stage == s for op in found.orders.ops()):
                text = f"training goes on as it is: {found.method} has B and W apart, but stages[{s}] is compiled"
                return {"kind": "kept", "text": text}
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
        self._events.add(step, order["kind"], order["text"] + took, seconds)
