"""Decision variables of the CP-SAT model: starts of ops, and literals for offloads and fused backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from ortools.sat.python import cp_model

from optpipe.ops import Op
from optpipe.problem import Problem
from solver.bounds.device import fusing_may_help
from solver.exact.ticks import TimeGrid


@dataclass(frozen=True)
class IntervalTask:
    """An op in the model: its start (ticks), its fixed length, and the interval they span."""

    op: Op
    start: cp_model.IntVar
    ticks: int
    interval: cp_model.IntervalVar

    @property
    def end(self) -> cp_model.LinearExpr:
        """End, in ticks."""
        return self.start + self.ticks


@dataclass(frozen=True)
class Moment:
    """The start or the end of a task."""

    task: IntervalTask
    is_end: bool

    @property
    def expression(self) -> cp_model.LinearExpr:
        """Time, in ticks."""
        return self.task.end if self.is_end else self.task.start

    def at(self, start: int) -> int:
        """Time if the task starts at `start`."""
        return start + self.task.ticks if self.is_end else start


class Variables:
    """Variables for a problem on a grid; no op ends later than `horizon` ticks.

    `tasks`: every op that may run. `leaves`: the literal of each (stage, microbatch) that may be offloaded. `fused`:
    the literal of each (stage, microbatch) whose W may follow its B at once, as one op BW; only on stages where that
    can save memory. `lengths`: the time between two moments for which bytes are held, and its least value. `firsts`:
    literals for which of two ops is first. `aways`: literals of offloads that leave room when an F starts, each with
    that F, stage and microbatch. `objective`: the value in ticks, at least the time between the two moments
    of each pair in `measured`.
    """

    def __init__(self, problem: Problem, grid: TimeGrid, horizon: int) -> None:
        self.problem = problem
        self.grid = grid
        self.horizon = horizon
        self.model = cp_model.CpModel()
        self.tasks: dict[Op, IntervalTask] = {}
        self.leaves: dict[tuple[int, int], cp_model.IntVar] = {}
        self.fused: dict[tuple[int, int], cp_model.IntVar] = {}
        self.lengths: list[tuple[cp_model.IntVar, Moment, Moment, int]] = []
        self.firsts: list[tuple[cp_model.IntVar, Op, Op]] = []
        self.aways: list[tuple[cp_model.IntVar, Op, int, int]] = []
        self.measured: list[tuple[Moment, Moment]] = []
        self.objective = self.model.new_int_var(0, horizon, "objective")
        self.length = cache(lambda kind, s: grid.length(problem.stages[s].duration_us(kind)))
        """Ticks of an op, by kind and stage."""

    def add_all(self) -> None:
        """Every op of the problem."""
        for s, stage in enumerate(self.problem.stages):
            for i in range(self.problem.microbatches):
                for kind in ("F", "B", "W"):
                    self.add_task(Op(kind, s, i), None)
                if fusing_may_help(self.problem, s):
                    self.fused[s, i] = self.model.new_bool_var(f"fused{s}.{i}")
                if stage.offload and stage.offload.bytes:
                    leaves = self.leaves[s, i] = self.model.new_bool_var(f"leaves{s}.{i}")
                    for kind in ("O", "R"):
                        self.add_task(Op(kind, s, i), leaves)

    def add_task(
        self, op: Op, presence: cp_model.IntVar | None, earliest: int = 0, latest_end: int | None = None
    ) -> None:
        """An op that runs if `presence` (None: always), from `earliest` on and until `latest_end` (None: horizon)."""
        ticks = self.length(op.kind, op.stage)
        last_start = (self.horizon if latest_end is None else latest_end) - ticks
        start = self.model.new_int_var(earliest, max(last_start, earliest), str(op))
        if presence is None:
            interval = self.model.new_fixed_size_interval_var(start, ticks, f"{op}.")
        else:
            interval = self.model.new_optional_fixed_size_interval_var(start, ticks, presence, f"{op}.")
        self.tasks[op] = IntervalTask(op, start, ticks, interval)

    def place(self, op: Op, start: int) -> None:
        """An op whose start is fixed."""
        ticks, constant = self.length(op.kind, op.stage), self.model.new_constant(start)
        interval = self.model.new_fixed_size_interval_var(constant, ticks, f"{op}.")
        self.tasks[op] = IntervalTask(op, constant, ticks, interval)

    def span(
        self, name: str, first: Moment, last: Moment, presence: cp_model.BoolVarT | None, least: int = 0
    ) -> cp_model.IntervalVar:
        """The interval between two moments, there if `presence` is (None: always); no shorter than `least` ticks."""
        least = min(least, self.horizon)
        length = self.model.new_int_var(least, self.horizon, f"{name}.length")
        self.lengths.append((length, first, last, least))
        if presence is None:
            return self.model.new_interval_var(first.expression, length, last.expression, name)
        return self.model.new_optional_interval_var(first.expression, length, last.expression, presence, name)

    @cached_property
    def fusing_stages(self) -> set[int]:
        """The stages that may have fused backwards."""
        return {s for s, _ in self.fused}

    @cached_property
    def round_trips(self) -> Sequence[int]:
        """For each stage the ticks from the start of F to the earliest start of B: on to the last stage and back."""
        ticks, last = self.grid.ticks, len(self.problem.stages) - 1
        from_last = [self.length("F", last)]
        for s in reversed(range(last)):
            delays = ticks(self.problem.forward_delay_us[s]) + ticks(self.problem.backward_delay_us[s])
            from_last.append(self.length("F", s) + delays + from_last[-1] + self.length("B", s + 1))
        return from_last[::-1]

    def task(self, kind: str, stage: int, microbatch: int) -> IntervalTask:
        """The task of an op that the model has."""
        return self.tasks[Op(kind, stage, microbatch)]
