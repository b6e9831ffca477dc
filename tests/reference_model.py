"""The exact optimum of tiny problems, straight from the contract: no cuts, no dominance, nothing of the solvers.

It shares with the program only the document `Problem`, so that what the program claims to be optimal or infeasible can
be held against something that does not repeat its reasoning. It is far too slow for anything but tiny problems.

Time is whole ticks, in which every duration and delay is exact. Memory and order at one instant need a sequence, so an
op without length takes one tick, and all of them together less than one of the original ticks: rounding down takes them
away again. Device spans of fixed orders have their least maximum at a mean over at most as many terms as devices
(`optpipe.simulate`), so all times are multiplied by a number that each of these counts divides.

A schedule must keep each device's budget under any timing. What B takes at its end counts from its start, since nothing
on another stream can be waited for in the middle of an op; otherwise planned times say it all (`optpipe.memory`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from math import lcm
from typing import NamedTuple

from ortools.sat.python import cp_model

from optpipe.problem import Problem
from optpipe.stage import Stage

Time = cp_model.LinearExprT
Change = tuple[Time, int, cp_model.LiteralT]
"""Time of a change of a level, its bytes, and the literal that says if it happens."""


class _Run(NamedTuple):
    """An op that runs if `present`."""

    start: cp_model.IntVar
    end: cp_model.LinearExpr
    present: cp_model.LiteralT
    interval: cp_model.IntervalVar


class TooHardError(Exception):
    """The problem is not tiny enough."""


def reference_optimum_us(problem: Problem, *, fused: bool = True) -> Fraction | None:
    """The least value of any schedule, None where none keeps the budgets.

    Without `fused` only of schedules in which every B and W are apart. Raises TooHardError where that takes more than
    about a second.
    """
    model = _Model(problem, fused)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = 0.5
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:
        return None
    if status != cp_model.OPTIMAL:
        raise TooHardError
    return Fraction(int(solver.objective_value) // model.tick) / model.scale


class _Model:
    def __init__(self, problem: Problem, fused: bool) -> None:
        self.problem, self.fused = problem, fused
        self.model = cp_model.CpModel()
        self.always = self.model.new_constant(1)
        self.scale, self.tick = _scale(problem), 1 + _ops_without_length(problem)
        self.horizon = self._horizon()
        self.runs = {
            (kind, s, i): self._run(kind, stage)
            for s, stage in enumerate(problem.stages)
            for i in range(problem.microbatches)
            for kind in ("F", "B", "W", "BW", "O", "R")
            if self._may_run(kind, stage)
        }
        self._presence()
        self._dataflow()
        self._microbatch_order()
        self._one_at_a_time()
        self._memory()
        self._objective()

    def _may_run(self, kind: str, stage: Stage) -> bool:
        return kind not in "OR" or stage.offload is not None

    def _ticks(self, time_us: float) -> int:
        ticks = Fraction(str(time_us)) * self.scale * self.tick
        assert ticks.denominator == 1
        return int(ticks)

    def _horizon(self) -> int:
        """All ops and delays one after another: there is no need to wait longer; for spans once on every device."""
        problem = self.problem
        ops = [(stage, kind) for stage in problem.stages for kind in ("F", "B", "W", "O", "R")]
        lengths = [max(1, self._ticks(s.duration_us(k))) for s, k in ops if k in "FBW" or s.offload]
        delays = [self._ticks(delay) for delay in (*problem.forward_delay_us, *problem.backward_delay_us)]
        once = problem.microbatches * (sum(lengths) + sum(delays))
        return once if problem.objective == "makespan" else 2 * once

    def _run(self, kind: str, stage: Stage) -> _Run:
        length = max(1, self._ticks(stage.duration_us(kind)))
        start = self.model.new_int_var(0, self.horizon, "")
        present = self.always if kind == "F" else self.model.new_bool_var("")
        interval = self.model.new_optional_fixed_size_interval_var(start, length, present, "")
        return _Run(start, start + length, present, interval)

    def _presence(self) -> None:
        """B and W, or BW; O and R both or neither."""
        for (kind, s, i), run in self.runs.items():
            if kind == "W":
                self.model.add(run.present == self.runs["B", s, i].present)
            if kind == "BW":
                self.model.add(run.present + self.runs["B", s, i].present == 1)
                if not self.fused:
                    self.model.add(run.present == 0)
            if kind == "R":
                self.model.add(run.present == self.runs["O", s, i].present)

    def _after(self, first: _Run, second: _Run, delay_us: float = 0) -> None:
        """The second starts after the end of the first, where both are there."""
        after = self.model.add(second.start >= first.end + self._ticks(delay_us))
        after.only_enforce_if(first.present, second.present)

    def _dataflow(self) -> None:
        problem, runs = self.problem, self.runs
        for kind, s, i in runs:
            before: list[tuple[str, int, float]] = []
            if kind == "F" and s > 0:
                before = [("F", s - 1, problem.forward_delay_us[s - 1])]
            elif kind in ("B", "BW"):
                before = [("F", s, 0), ("R", s, 0)]
                if s + 1 < len(problem.stages):
                    before += [(back, s + 1, problem.backward_delay_us[s]) for back in ("B", "BW")]
            elif kind in "WOR":
                before = [({"W": "B", "O": "F", "R": "O"}[kind], s, 0)]
            for earlier, stage, delay_us in before:
                if (earlier, stage, i) in runs:
                    self._after(runs[earlier, stage, i], runs[kind, s, i], delay_us)

    def _microbatch_order(self) -> None:
        """Within one op type of a stage; BW counts as B, not as W."""
        for (one, s, i), (other, t, j) in product(self.runs, repeat=2):
            if i < j and s == t and (one == other or {one, other} == {"B", "BW"}):
                self._after(self.runs[one, s, i], self.runs[other, t, j])

    def _one_at_a_time(self) -> None:
        """Compute ops of a device, transfers of a channel."""
        for stages in self.problem.stages_of:
            self.model.add_no_overlap(self._intervals(stages, ("F", "B", "W", "BW")))
        for group in self.problem.channel_groups:
            stages = [s for d in group for s in self.problem.stages_of[d]]
            for kinds in ("O", "R") if self.problem.copy_channels.duplex else ("OR",):
                self.model.add_no_overlap(self._intervals(stages, tuple(kinds)))

    def _intervals(self, stages: Sequence[int], kinds: Sequence[str]) -> list[cp_model.IntervalVar]:
        return [run.interval for (kind, s, _), run in self.runs.items() if s in stages and kind in kinds]

    def _memory(self) -> None:
        for d, device in enumerate(self.problem.devices):
            here = [c for key in self.runs if self.problem.stages[key[1]].device == d for c in self._on_device(*key)]
            self._keep(device.memory_bytes, here)
        self._keep(self.problem.host_memory_bytes, [c for key in self.runs for c in self._on_host(*key)])

    def _keep(self, budget: int | None, changes: Sequence[Change]) -> None:
        changes = [change for change in changes if change[1]]
        if budget is not None and changes:
            times, sizes, present = zip(*changes, strict=True)
            least = -sum(abs(size) for size in sizes)
            self.model.add_reservoir_constraint_with_active(times, sizes, present, least, budget)

    def _on_device(self, kind: str, s: int, i: int) -> Iterator[Change]:
        """Bytes that an op takes of its device's memory at its start, and the change at its end."""
        stage, run = self.problem.stages[s], self.runs[kind, s, i]
        moved = stage.offload.bytes if stage.offload else 0
        activation, kept, work = stage.activation_bytes, stage.backward_weight_bytes, stage.workspace_bytes
        taken, change = {
            "F": (activation + work.F, activation),
            "B": (max(work.B, kept - activation), kept - activation),
            "W": (work.W, -kept),
            "BW": (work.BW, -activation),
            "O": (0, -moved),
            "R": (moved, moved),
        }[kind]
        yield run.start, taken, run.present
        yield run.end, change - taken, run.present

    def _on_host(self, kind: str, s: int, i: int) -> Iterator[Change]:
        """The host's buffer is held while both copies run, and between them."""
        stage, run = self.problem.stages[s], self.runs[kind, s, i]
        moved = stage.offload.bytes if stage.offload else 0
        if kind == "O":
            yield run.start, moved, run.present
        if kind == "R":
            yield run.end, -moved, run.present

    def _objective(self) -> None:
        """Last end minus first start, over all devices or on the worst."""
        spans = self.problem.stages_of if self.problem.objective == "device_span" else [range(len(self.problem.stages))]
        value = self.model.new_int_var(0, self.horizon, "value")
        for stages in spans:
            begin = self.model.new_int_var(0, self.horizon, "begin")
            for (_, s, _), run in self.runs.items():
                if s in stages:
                    self.model.add(begin <= run.start).only_enforce_if(run.present)
                    self.model.add(value >= run.end - begin).only_enforce_if(run.present)
        self.model.minimize(value)


def _scale(problem: Problem) -> int:
    """Ticks that a microsecond needs, but for those of ops without length."""
    times = [*problem.forward_delay_us, *problem.backward_delay_us]
    for stage in problem.stages:
        times += [stage.duration_us(kind) for kind in ("FBWOR" if stage.offload else "FBW")]
    means = range(1, len(problem.devices) + 1) if problem.objective == "device_span" else [1]
    return lcm(*(Fraction(str(time)).denominator for time in times)) * lcm(*means)


def _ops_without_length(problem: Problem) -> int:
    kinds = [(s, kind) for s in problem.stages for kind in ("F", "B", "W", "O", "R") if kind in "FBW" or s.offload]
    return problem.microbatches * sum(not stage.duration_us(kind) for stage, kind in kinds)
