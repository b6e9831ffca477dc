"""Re-solving callback: updated costs, background search, and switching when the prediction gains.

Every process times its own ops. Rank 0 alone searches, in a process of its own; no rank waits for a search.
Its result is broadcast and all ranks switch together.

When to switch: a found schedule must save at least `least_gain` of the step that the schedule in use predicts, both
simulated with the newest costs, so that errors of the model largely cancel; its memory, waiting messages included, must
fit; and every stage must be able to run it. The steps that follow are a trial: if they turn out longer than the steps
before the switch, all ranks switch back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import numpy as np

from optpipe.costs import FACTOR_OF_TIME
from optpipe.kinds import COPIES, HALVES, KIND, KINDS
from optpipe.ops import Op
from optpipe.problem import Floats, Problem
from optpipe.profile.measured import Gather, Measured
from optpipe.profile.ops import Spread, spread_of, timed_kind
from optpipe.runtime.recorder import CudaRecorder, HostRecorder, Recorder, Timing
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.stage import UnitFactors
from optpipe.train.callback import Callback
from optpipe.train.config import OnlineConfig
from optpipe.train.lengths import TIMES, SizeCosts, Sizes, fit_times, typical
from optpipe.train.model import Model
from optpipe.train.resolve.initial import InitialSchedule, arranged
from optpipe.train.resolve.search import Search, Solver
from optpipe.train.result import Events
from optpipe.train.update import StepOutcome
from optpipe.units import bytes_text, percent_text, time_text

STEPS_BEFORE = 20
"""Most steps before a switch that a trial compares with."""

FIRST_STEPS = 2
"""Steps after a switch that do not count: host buffers get their sizes, memory is allocated."""

STEPS_AFTER = 5
"""Steps after those that decide a trial."""


@dataclass(frozen=True)
class Choice:
    """Step times that both schedules predict with the newest costs."""

    in_use_us: float
    found_us: float
    least_gain: float

    @property
    def gain(self) -> float:
        """Share of the step in use that the found schedule saves; negative if it takes longer."""
        return 1 - self.found_us / self.in_use_us if self.in_use_us else 0.0

    @property
    def better(self) -> bool:
        """True if it saves something, and at least `least_gain`."""
        return self.gain > 0 and self.gain >= self.least_gain


def choose(problem: Problem, in_use: Schedule, found: Schedule, least_gain: float) -> Choice:
    """Simulate both schedules' orders with the costs of a problem, each with its factors where they are best."""
    in_use_us, found_us = (
        simulate(arranged(problem, schedule), schedule.orders_in(problem)).value_us for schedule in (in_use, found)
    )
    return Choice(in_use_us, found_us, least_gain)


class Trial:
    """First steps with a new schedule, compared with the last steps of the one before."""

    def __init__(self, before_seconds: Sequence[float]) -> None:
        self._before = list(before_seconds)[-STEPS_BEFORE:]
        self._after: list[float] = []

    def add(self, seconds: float) -> None:
        """Count a step with the new schedule."""
        self._after.append(seconds)

    @property
    def over(self) -> bool:
        """True once enough steps have been counted."""
        return len(self._counted) >= STEPS_AFTER

    @property
    def figures(self) -> str:
        """Medians of both, as text."""
        after = f"{median(self._counted):.3f} s after the change"
        return f"steps take {after}, {median(self._before):.3f} s before it" if self._before else f"steps take {after}"

    @property
    def worse(self) -> bool:
        """True if the median of the new steps is above the upper quartile of the old ones.

        Comparing with the median alone would switch back in half of all trials of an equally fast schedule.
        """
        if len(self._before) < STEPS_AFTER:
            return False
        return median(self._counted) > quantiles(self._before, n=4, method="inclusive")[2]

    @property
    def _counted(self) -> list[float]:
        return self._after[FIRST_STEPS:]


def numbered(timings: Iterable[Timing]) -> Iterator[tuple[int, Timing]]:
    """Timings of several steps, each with the number of its step among them."""
    seen: Counter[Op] = Counter()
    for timing in timings:
        yield seen[timing.action.key], timing
        seen[timing.action.key] += 1


def factor_rows(kind: str) -> list[int]:
    """Rows among the factors of microbatches (`SizeCosts.factors`) of the parts of an op's duration."""
    return [UnitFactors._fields.index(FACTOR_OF_TIME[name]) for name in KIND[kind].times]


def size_costs(
    timings: Iterable[Timing],
    sizes: Sequence[Sequence[Sizes]],
    gather: Gather,
    modes: Mapping[tuple[int, int], str] | None = None,
) -> SizeCosts | None:
    """Fit the times of compute ops to the `sizes` of the microbatches in each place, for each timed step.

    Each kind of op of a stage is fitted by itself, and what is fitted is added up for each time that it consists of.
    None where nothing could be fitted. Called by all processes together, with the same result.
    """
    groups: dict[tuple[int, str, str], tuple[list[Sizes], list[float]]] = {}
    for step, timing in numbered(timings):
        stage, place, kind = timing.action.stage, timing.action.microbatch, timing.action.kind
        if kind in KINDS and kind not in COPIES:
            of_mode = timed_kind(kind, (modes or {}).get((stage, place)))
            of_group = groups.setdefault((stage, kind, of_mode), ([], []))
            of_group[0].append(sizes[step][place])
            of_group[1].append((timing.end_ns - timing.start_ns) / 1000)
    own = np.zeros((len(TIMES), 3))
    for (_, kind, _), (of_ops, times_us) in groups.items():
        if len(set(of_ops)) > 1:
            own[factor_rows(kind)] += fit_times(of_ops, times_us) * len(times_us)
    fitted = np.sum(gather(own.tolist()), axis=0)
    total = fitted.sum(axis=0)
    if not total[1:].any():
        return None
    rows = [row if row.any() else total for row in fitted]  # what no timed step had grows as all others do
    return SizeCosts({name: row.tolist() for name, row in zip(TIMES, rows, strict=True)})


OpTimes = Mapping[int, Mapping[str, Spread]]
"""By stage and kind of op."""


def op_times(
    timings: Iterable[Timing],
    gather: Gather,
    modes: Mapping[tuple[int, int], str] | None = None,
    factors: Sequence[Floats] = (),
) -> OpTimes:
    """Spread of every kind of op of every stage over all microbatches of the timed steps.

    `modes`: names by stage and microbatch, of those that are not kept or offloaded whole: their copies are of other
    sizes. `factors`: of the microbatches in each place, for each timed step, where their sizes differ: times are
    divided by them. The slowest replica counts, because the others wait for it. Called by all processes together.
    """
    samples: dict[str, dict[str, list[float]]] = {}
    for step, timing in numbered(timings):
        action = timing.action
        if action.kind in KINDS:
            kinds = samples.setdefault(str(action.stage), {})
            kind = timed_kind(action.kind, (modes or {}).get((action.stage, action.microbatch)))
            factor = factors[step][factor_rows(action.kind), action.microbatch].mean() if factors else 1.0
            kinds.setdefault(kind, []).append((timing.end_ns - timing.start_ns) / 1000 / factor)
    own = {s: {kind: asdict(spread_of(us)) for kind, us in kinds.items()} for s, kinds in samples.items()}
    slowest: dict[int, dict[str, Spread]] = {}
    for rank in gather(own):
        for s, kinds in rank.items():
            times = slowest.setdefault(int(s), {})
            for kind, data in kinds.items():
                spread = Spread(**data)
                times[kind] = max(times.get(kind, spread), spread, key=lambda spread: spread.median_us)
    return slowest


def retimed(measured: Measured, times: OpTimes) -> Measured:
    """Measurements with the times of ops replaced by those in training.

    A kind of op that no timed step had (BW where B and W are apart, copies) is scaled like the timed ones of its stage.
    """
    stages = []
    for s, figures in enumerate(measured.stages):
        timed = {kind: spread for kind, spread in times.get(s, {}).items() if kind in figures.times}
        before_us = sum(figures.times[kind].median_us for kind in timed)
        scale = sum(spread.median_us for spread in timed.values()) / before_us if before_us else 1.0
        scaled = {
            kind: Spread(spread.median_us * scale, spread.lower_us * scale, spread.upper_us * scale, spread.count)
            for kind, spread in figures.times.items()
        }
        stages.append(replace(figures, times=scaled | timed))
    return replace(measured, stages=stages)


def drift(before: Problem, after: Problem) -> float:
    """Relative change of op times, of the device where it is largest.

    For a device: the sum over its stages and kinds of |after - before|, divided by the sum of before.
    """
    drifts = []
    for stages in before.stages_of:
        pairs = [
            (before.stages[s].duration_us(kind), after.stages[s].duration_us(kind))
            for s in stages
            for kind in ("F", "B", "W", *(("O", "R") if before.stages[s].offload and after.stages[s].offload else ()))
        ]
        for own, other in ((before.stages[s], after.stages[s]) for s in stages):
            again = {mode.name: mode.recompute_us for mode in other.choices}
            pairs += [(mode.recompute_us, again[mode.name]) for mode in own.choices if mode.name in again]
        total_us = sum(was for was, _ in pairs)
        drifts.append(sum(abs(now - was) for was, now in pairs) / total_us if total_us else 0.0)
    return max(drifts)


def drift_of_factors(before: Problem, after: Problem) -> float:
    """Relative change of the times of typical microbatches: the sum of the changes, divided by the sum of before."""
    times = [np.sort(problem.microbatch_work_us) for problem in (before, after)]
    return float(np.abs(times[1] - times[0]).sum() / times[0].sum()) if times[0].any() else 0.0


class ResolveCallback(Callback):
    """Times ops, re-solves and switches, from the model's step on. `solver`: rank 0's, None on other ranks."""

    def __init__(
        self, config: OnlineConfig, model: Model, first: InitialSchedule, solver: Solver | None, events: Events
    ) -> None:
        self._config, self._model, self._events = config, model, events
        self._search = Search(solver, config) if solver else None
        self._setting, self._measured, self._reference = first.setting, first.measured, first.reference
        self._problem = first.setting.problem(first.measured)
        self._solved_for: Problem | None = None
        self._stale = False
        self._begin = model.step_number + config.first_step
        self._recorder: HostRecorder | CudaRecorder | None = None
        self._recorded: dict[int, float] = {}
        self._seconds: deque[float] = deque(maxlen=STEPS_BEFORE)
        self._trial: Trial | None = None
        self._before = model.schedule, model.reference

    def recorder(self, step: int) -> Recorder | None:
        """Recorder of op times in `record_steps` out of every `every_steps` steps."""
        position = (step - self._begin) % self._config.every_steps
        if step < self._begin or position >= self._config.record_steps:
            return None
        if self._recorder is None:
            self._recorder = CudaRecorder() if self._model.hardware.type == "cuda" else HostRecorder()
        self._recorded[step] = 0.0
        return self._recorder

    def is_due(self, step: int) -> bool:
        """True after the last of the steps that are timed together."""
        since = step - self._begin - self._config.record_steps
        return since >= 0 and since % self._config.every_steps == 0

    def requests(self) -> bool:
        """True on rank 0 when a search or a trial is over."""
        if self._trial is not None:
            return self._trial.over
        return self._search is not None and self._search.over

    def on_step_boundary(self, step: int) -> None:
        """Update costs from timed steps, switch schedules if rank 0 offers one, and re-solve if costs have drifted."""
        if self._recorder is not None and self.is_due(step):
            self._learn(step, self._recorder)
            self._recorder, self._recorded = None, {}
        self._apply(step, self._model.launch.broadcast(self._offer() if self._model.launch.rank == 0 else None))
        if self._stale and self._trial is None and self._search is not None and not self._search.running:
            self._solve(step, self._search)

    def done(self, outcome: StepOutcome) -> None:
        """Record the duration of a step. Steps timed op by op are slower and judge no schedule."""
        if outcome.step in self._recorded:
            self._recorded[outcome.step] = outcome.seconds
        elif self._trial is not None:
            self._trial.add(outcome.seconds)
        else:
            self._seconds.append(outcome.seconds)

    def end(self) -> None:
        """End the search."""
        if self._search is not None:
            self._search.cancel()

    def _learn(self, step: int, recorder: HostRecorder | CudaRecorder) -> None:
        """Put the timed ops into the problem, which is stale if it has drifted from the one that was solved."""
        begin, model, modes = perf_counter(), self._model, self._model.program.modes
        timings, gather = recorder.timings(), model.launch.gather
        factors = self._learn_sizes(timings) if model.shapes else []
        self._measured = retimed(self._measured, op_times(timings, gather, modes, factors))
        self._problem, before = self._setting.problem(self._measured), self._solved_for or self._problem
        changed = max(drift(before, self._problem), drift_of_factors(before, self._problem))
        self._stale = self._solved_for is None or changed > self._config.drift
        seconds = perf_counter() - begin
        cost = f"timed every op in {len(self._recorded)} steps of {median(self._recorded.values()):.3f} s"
        if self._seconds:
            cost += f" ({median(self._seconds):.3f} s when not)"
        text = f"{cost}, gathered in {seconds:.3f} s; {percent_text(changed)} away from the times that were solved for"
        self._events.add(step, "timed", text if self._stale else f"{text}, too little to solve anew", seconds)

    def _learn_sizes(self, timings: Sequence[Timing]) -> list[Floats]:
        """Fit times to the sizes of the timed microbatches, and renew the factors of those that are typical.

        Returns the factors of the microbatches in each place, for each timed step of this replica.
        """
        model, launch = self._model, self._model.launch
        own, model.recorded_sizes = model.recorded_sizes, []
        costs = size_costs(timings, own, launch.gather, model.program.modes)
        model.size_costs = costs or model.size_costs
        of_replicas = launch.gather(own)[:: launch.pipeline_processes]
        sizes = [Sizes(*size) for steps in of_replicas for step in steps for size in step]
        all_factors = model.size_costs.factors(sizes, self._reference)
        self._setting = replace(self._setting, factors=typical(all_factors, self._setting.microbatches))
        return [model.size_costs.factors(step, self._reference) for step in own]

    def _solve(self, step: int, search: Search) -> None:
        """Start a search with the newest costs, within the memory that messages leave. Rank 0 alone."""
        self._problem = arranged(self._setting.problem(self._measured), self._model.schedule)
        search.begin(self._problem, self._model.schedule)
        self._solved_for, self._stale = self._problem, False
        self._events.add(step, "solving", f"solving beside the training, up to {self._config.time_limit_s:g} s")

    def _offer(self) -> dict[str, Any] | None:
        """Decision of rank 0 for all ranks, as JSON values; None if there is none."""
        if self._trial is not None:
            if not self._trial.over:
                return None
            figures = self._trial.figures
            if self._model.launch.world == 1:  # no step of one process can confirm or refute a prediction
                figures += "; devices take turns in this one process, so a step is the sum of all ops"
                return {"kind": "kept", "text": figures}
            if self._trial.worse:
                return {"kind": "back", "text": f"{figures}: back to the schedule before", "schedule": None}
            return {"kind": "kept", "text": f"{figures}: kept"}
        if self._search is None or not self._search.over:
            return None
        found = self._search.take()
        if found is None:
            return {"kind": "kept", "text": f"training goes on as it is: {self._search.why_nothing}"}
        if any(excess := self._setting.excess_bytes(found, self._measured)):
            self._setting, self._stale = self._setting.reserving(excess), True
            text = f"{found.method} would take {bytes_text(max(excess))} too many for messages"
            return {"kind": "kept", "text": text}
        for s, stage in enumerate(self._measured.stages):
            if not stage.splits and any(op.kind in HALVES and op.stage == s for op in found.orders.ops()):
                text = f"training goes on as it is: {found.method} has B and W apart, but stages[{s}] is compiled"
                return {"kind": "kept", "text": text}
        choice = choose(self._problem, self._model.schedule, found, self._config.least_gain)
        in_use, new = time_text(choice.in_use_us), time_text(choice.found_us)
        figures = f"{in_use} a step predicted, {new} with {found.method}"
        if not choice.better:
            least = self._config.least_gain
            return {"kind": "kept", "text": f"{figures}: {choice.gain:.2%} less, under {least:.2%}; nothing is changed"}
        text = f"{figures}, {choice.gain:.1%} less (at most {1 - found.bound_us / choice.in_use_us:.1%} is possible)"
        return {"kind": "swapped", "text": text, "schedule": found.to_data()}

    def _apply(self, step: int, decision: dict[str, Any] | None) -> None:
        """Carry out the decision of rank 0."""
        if decision is None:
            return
        begin = perf_counter()
        self._trial = None
        if "schedule" in decision:
            data = decision["schedule"]
            new = self._before if data is None else (Schedule.from_data(data), self._reference)
            before = self._model.schedule, self._model.reference
            self._model.swap(*new)
            self._recorder, self._recorded = None, {}  # what was timed is of other modes
            self._model.recorded_sizes = []
            self._before = before
            self._trial = Trial(self._seconds) if decision["kind"] == "swapped" else None
            self._seconds.clear()
        seconds = perf_counter() - begin
        took = f"; the change took {seconds:.3f} s" if "schedule" in decision else ""
        self._events.add(step, decision["kind"], decision["text"] + took, seconds)
