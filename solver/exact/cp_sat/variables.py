"""Decision variables of the CP-SAT model: starts of ops, literals for variants of activations and fused backwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from ortools.sat.python import cp_model

from optpipe.kinds import COPIES, INSIDE, KIND, OPTIONAL, TRAINING
from optpipe.ops import Op
from optpipe.problem import Problem
from optpipe.task_graph import TaskGraph, lower
from solver.bounds.device import fusing_may_help
from solver.exact.ticks import TimeGrid


@dataclass(frozen=True)
class IntervalTask:
    """An op in the model: its start (ticks), its length apart from blocks, and the interval from start to end.

    One that may be part of a block, and then takes longer, has a `stretched_end`.
    """

    op: Op
    start: cp_model.IntVar
    ticks: int
    interval: cp_model.IntervalVar
    stretched_end: cp_model.IntVar | None = None

    @property
    def end(self) -> cp_model.LinearExpr:
        """End, in ticks."""
        return self.start + self.ticks if self.stretched_end is None else self.stretched_end


@dataclass(frozen=True)
class Moment:
    """The start or the end of a task."""

    task: IntervalTask
    is_end: bool

    @property
    def expression(self) -> cp_model.LinearExpr:
        """Time, in ticks."""
        return self.task.end if self.is_end else self.task.start

    def at(self, start: int, more_ticks: int = 0) -> int:
        """Time if the task starts at `start`, and takes so many ticks more in its block."""
        return start + self.task.ticks + more_ticks if self.is_end else start


class Stretch(NamedTuple):
    """Length and end of an op that may take longer in blocks, by so many ticks in each; `apart` if it is in none."""

    apart: cp_model.IntVar
    length: cp_model.IntVar
    end: cp_model.IntVar
    blocks: Sequence[tuple[cp_model.IntVar, int]]


class OptionTasks(NamedTuple):
    """An option of an activation, its literal, and the tasks that are there with it, by kind.

    These are its O, R and C; CB stands for the recomputation alone that its B follows at once.
    """

    number: int
    literal: cp_model.BoolVarT
    tasks: Mapping[str, IntervalTask]


def forms(graph: TaskGraph, s: int) -> Sequence[tuple[int, tuple[str, ...]]]:
    """Options of a stage in every form, with the tasks that each has besides F, B and W, as in `OptionTasks`.

    A copy of no bytes is left out: it frees nothing and takes time.
    """
    found = []
    for option in range(graph.options[s]):
        if option and not graph.duties["C"][s, option] and not graph.sizes_bytes["copied"][s, option].any():
            continue  # no other than to keep
        for chain in graph.chains(s, option):
            kinds = [kind for kind in chain if not {*OPTIONAL}.isdisjoint(KIND[kind].duties)]
            found.append((option, tuple("CB" if kind in INSIDE else kind for kind in kinds)))
    return list(dict.fromkeys(found))  # once, whether the backward is split or fused


class Variables:
    """Variables for a problem on a grid; no op ends later than `horizon` ticks.

    `passes`: for each stage the ops that every unit has there. `tasks`: every op that may run, of one length each.
    `leaves`: the literal of each (stage, microbatch) that may be offloaded, on stages without activation modes.
    `options`: on stages with modes those of each (stage, microbatch), of which one is taken. `fused`: the literal of
    each (stage, microbatch) whose W follows its B at once, as one op BW; only on stages where that can save memory or
    has to be. `lengths`: the time between two moments for which bytes are held, and its least value. `firsts`: literals
    for which of two ops is first. `aways`: literals of offloads that leave room when an F starts, each with that F,
    stage and microbatch. `objective`: the value in ticks, at least the time between the two moments of each pair in
    `measured`. `barriers`: for each (pass, microbatch) a tick by which it has ended on every device. `blocks`: the
    literal of each F and BW that may be one (`solver.exact.cp_sat.blocks`). `stretches`: of the F and W of those.
    `apart`: the interval of each of these F, there if it is in none.

    `before`: where the order of microbatches is free, the literal of each two that differ, of which the
    first is true if the lower number runs first.
    """

    def __init__(self, problem: Problem, grid: TimeGrid, horizon: int) -> None:
        self.problem = problem
        self.graph = graph = lower(problem)
        self.grid = grid
        self.horizon = horizon
        self.model = cp_model.CpModel()
        self.passes = [[kind for kind in TRAINING if graph.duties[kind][s].all()] for s in range(len(problem.stages))]
        self.tasks: dict[Op, IntervalTask] = {}
        self.leaves: dict[tuple[int, int], cp_model.IntVar] = {}
        self.options: dict[tuple[int, int], list[OptionTasks]] = {}
        self.fused: dict[tuple[int, int], cp_model.IntVar] = {}
        self.lengths: list[tuple[cp_model.IntVar, Moment, Moment, int]] = []
        self.firsts: list[tuple[cp_model.IntVar, Op, Op]] = []
        self.aways: list[tuple[cp_model.IntVar, Op, int, int]] = []
        self.measured: list[tuple[Moment, Moment]] = []
        self.before: dict[tuple[int, int], cp_model.IntVar] = {}
        self.barriers: dict[tuple[int, int], cp_model.IntVar] = {}
        self.blocks: dict[tuple[Op, Op], cp_model.IntVar] = {}
        self.stretches: dict[Op, Stretch] = {}
        self.apart: dict[Op, cp_model.IntervalVar] = {}
        self._both: dict[tuple[int, ...], cp_model.IntVar] = {}
        self.objective = self.model.new_int_var(0, horizon, "objective")
        self.length = cache(
            lambda kind, s, i=0: self.ticks(kind, s, i, int(graph.whole_option[s]) if kind in COPIES else 0)
        )
        """Ticks of an op, by kind, stage (of a pass the device) and unit; of a copy those of a unit offloaded whole."""

    def ticks(self, kind: str, s: int, i: int, option: int) -> int:
        """Ticks of a task of a unit in an option, by kind as in `OptionTasks`."""
        if kind == "CB":
            time_us = self.graph.times_us["recompute_inside"][s, option, self.graph.unit_class[i]]
        else:
            time_us = self.graph.duration_us[self.graph.type_of(kind, s, option, i)]
        return self.grid.length(float(time_us))

    def add_all(self) -> None:
        """Every op of the problem."""
        for s, passes in enumerate(self.passes):
            entries, may_fuse = forms(self.graph, s), fusing_may_help(self.problem, s)
            for i in range(self.problem.units):
                for kind in passes:
                    self.add_task(Op(kind, s, i), None)
                if may_fuse:
                    fused = self.model.new_bool_var(f"fused{s}.{i}")
                    self.fused[s, i] = fused if self.graph.splits[s] else self.model.new_constant(1)
                if self.graph.has_modes[s]:
                    self._add_options(s, i, entries)
                elif len(entries) > 1:
                    leaves = self.leaves[s, i] = self.model.new_bool_var(f"leaves{s}.{i}")
                    for kind in entries[1][1]:
                        self.add_task(Op(kind, s, i), leaves)
        for n, one in enumerate(self.graph.passes):
            for i in range(self.problem.units):
                self.barriers[n, i] = self.model.new_int_var(0, self.horizon, f"all{one.name}.{i}")
                for d in one.devices:
                    self.add_task(Op(one.name, d, i), None)

    def _add_options(self, s: int, i: int, entries: Sequence[tuple[int, Sequence[str]]]) -> None:
        """A literal for each of the `forms` of a stage with modes, and the ops that a microbatch has in it alone."""
        options: list[OptionTasks] = []
        starts: dict[str, cp_model.IntVar] = {}
        for n, (number, kinds) in enumerate(entries):
            literal, tasks = self.model.new_bool_var(f"variant{s}.{i}.{n}"), {}
            for kind in kinds:
                op, ticks = Op(kind, s, i), self.ticks(kind, s, i, number)
                if kind not in starts:  # one for all options, so that microbatches are in order whatever they choose
                    starts[kind] = self.model.new_int_var(0, self.horizon, str(op))
                start = starts[kind]
                if kind == "CB":
                    self.model.add(self.task("B", s, i).start == start + ticks).only_enforce_if(literal)
                interval = self.model.new_optional_fixed_size_interval_var(start, ticks, literal, f"{op}.{n}")
                tasks[kind] = IntervalTask(op, start, ticks, interval)
            options.append(OptionTasks(number, literal, tasks))
        self.model.add_exactly_one(option.literal for option in options)
        self.options[s, i] = options

    def add_task(
        self, op: Op, presence: cp_model.IntVar | None, earliest: int = 0, latest_end: int | None = None
    ) -> None:
        """An op that runs if `presence` (None: always), from `earliest` on and until `latest_end` (None: horizon).

        The start of an absent op stays a variable, no less than the end of the one before it, so it has no length.
        """
        ticks = self.length(*op)
        last_start = self.horizon if latest_end is None else latest_end
        if presence is None or latest_end is not None:
            last_start -= ticks
        start = self.model.new_int_var(earliest, max(last_start, earliest), str(op))
        if presence is None:
            interval = self.model.new_fixed_size_interval_var(start, ticks, f"{op}.")
        else:
            interval = self.model.new_optional_fixed_size_interval_var(start, ticks, presence, f"{op}.")
        self.tasks[op] = IntervalTask(op, start, ticks, interval)

    def place(self, op: Op, start: int) -> None:
        """An op whose start is fixed."""
        ticks, constant = self.length(*op), self.model.new_constant(start)
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

    def both(self, *literals: cp_model.BoolVarT | None) -> cp_model.BoolVarT | None:
        """A literal that holds where all of these do (None: always)."""
        given = [literal for literal in literals if literal is not None]
        if len(given) < 2:
            return given[0] if given else None
        key = tuple(sorted(literal.index for literal in given))
        if key not in self._both:
            literal = self._both[key] = self.model.new_bool_var("both" + ".".join(map(str, key)))
            self.model.add_bool_and(given).only_enforce_if(literal)
            self.model.add_bool_or([literal, *(~other for other in given)])
        return self._both[key]

    def is_first(self, i: int, j: int) -> list[cp_model.BoolVarT] | None:
        """The literal that microbatch i runs before microbatch j where that is free.

        Of equal ones the lower runs first: then there is none, or None where i never does.
        """
        count = self.problem.slice_count
        a, b = (self.graph.unit_class[one * count : (one + 1) * count].tolist() for one in (i, j))
        if a == b:
            return [] if i < j else None
        key = min(i, j), max(i, j)
        if key not in self.before:
            self.before[key] = self.model.new_bool_var(f"microbatch{key[0]}before{key[1]}")
        return [self.before[key] if i < j else ~self.before[key]]

    @cached_property
    def _always(self) -> cp_model.IntVar:
        return self.model.new_constant(1)

    @cached_property
    def fusing_stages(self) -> set[int]:
        """The stages that may have fused backwards."""
        return {s for s, _ in self.fused}

    @cached_property
    def round_trips(self) -> Sequence[Sequence[int]]:
        """For each stage and unit the ticks from the start of F to the earliest start of B; 0 where there is no B.

        That is on to the last stage and back; or first the F of the next slice, its round trip, and its B.
        """
        ticks, stages = self.grid.ticks, len(self.problem.stages)
        forward_us, backward_us = (self.graph.delays_us[name].tolist() for name in ("forward", "backward"))
        trips = [[0] * self.problem.units for _ in range(stages)]
        of_class: dict[tuple[int, ...], list[list[int]]] = {}
        count = self.problem.slice_count
        for first in range(0, self.problem.units, count):
            classes = tuple(self.graph.unit_class[first : first + count].tolist())
            if classes not in of_class:
                columns: list[list[int]] = []  # of the slices from the last on, each by stage
                for i in reversed(range(first, first + count)):
                    trip, column = self.length("F", stages - 1, i), [0] * stages
                    for s in (s for s in reversed(range(stages)) if "B" in self.passes[s]):
                        if s + 1 < stages:
                            delay = ticks(forward_us[s][i]) + ticks(backward_us[s][i])
                            trip += self.length("F", s, i) + delay + self.length("B", s + 1, i)
                        if columns:
                            behind = columns[-1][s] + self.length("B", s, i + 1)
                            trip = max(trip, self.length("F", s, i) + behind)
                        column[s] = trip
                    columns.append(column)
                of_class[classes] = columns
            for i, column in enumerate(reversed(of_class[classes]), first):
                for s, trip in enumerate(column):
                    trips[s][i] = trip
        return trips

    def task(self, kind: str, stage: int, microbatch: int) -> IntervalTask:
        """The task of an op that the model has."""
        return self.tasks[Op(kind, stage, microbatch)]

    def options_of(self, stage: int, microbatch: int) -> Sequence[OptionTasks]:
        """The options of an activation, also of one on a stage without modes."""
        at = stage, microbatch
        if at in self.options:
            return self.options[at]
        if at not in self.leaves:
            return [OptionTasks(0, self._always, {})]
        copies = {kind: self.task(kind, *at) for kind in "OR"}
        whole = int(self.graph.whole_option[stage])
        return [OptionTasks(0, ~self.leaves[at], {}), OptionTasks(whole, self.leaves[at], copies)]
