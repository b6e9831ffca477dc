"""Bounds with activation modes: the cheapest mix of variants that byte-time, both windows, compute and copies allow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import ceil
from typing import Literal, NamedTuple

import numpy as np

from optpipe.ops import Floats
from optpipe.problem import Problem
from solver.bounds.device import Held, OnDevice, Piece, most_held_us
from solver.variants import Variant, fitting_variants

ROUNDING = 1e-9
"""Share by which the solution of a linear program may exceed its optimum."""

SMALLEST = 1e-6
"""Least factor of a linear program that surely counts: HiGHS leaves out those up to 1e-9."""

Backward = Literal["B", "BW"]

MOST_DEVICES = 48
"""Devices up to which the programs of all of them are solved."""


def mode_bounds_us(problem: Problem) -> Sequence[float]:
    """A bound from each device with stages and a budget: the least of a linear program over its modes.

    Proof. Let x say how many microbatches of each stage are in each variant. The device runs F, B, W and all
    recomputations, so its span is at least all of these and the idle time near both ends. Three things limit x.

    Byte-time, as for kept activations (`solver.bounds.units`): the budget times the span is at least what each
    variant needs at the least, and what cannot be used near both ends. A channel runs all copies one after another.

    Warm-up. No backward begins in the time `_warm_up_us` from the first op on, the turnaround. What has begun then is F
    and C, whose activations have at its end not been freed but by offload: they share the budget, and where they leave
    within it, the channel. At the start of the last F among them no variant holds less than what it keeps.

    Cool-down. No F runs in the time `_cool_down_us` that ends with the start of the last backward. What runs then, W
    and backwards with their recomputations, is of microbatches that were in flight before: without copies when the
    last F started, beside what this took; with copies when that time begins, and what was away then comes back in it.

    Recomputing a microbatch counts once, so one that is in flight in both windows counts for both: microbatches are in
    order, so there are some of these on a stage only if all are in one or the other. The two cases are two programs.
    Each is linear in numbers of microbatches and in times, so its least span is at most that of any schedule.
    docs/math/bounds.md has the rows.

    A program takes milliseconds. Of more than `MOST_DEVICES` devices some, evenly spread, have theirs solved, and then
    those around the one with the largest bound; the others have 0.
    """
    devices = ModesOnDevice.each(problem)
    bounds_us = [0.0] * len(devices)
    step = ceil(len(devices) / MOST_DEVICES)
    spread = range(0, len(devices), step)
    for d in spread:
        bounds_us[d] = _bound_us(devices[d])
    largest = max(spread, key=bounds_us.__getitem__, default=0)
    for d in range(max(largest - step + 1, 0), min(largest + step, len(devices))):
        bounds_us[d] = bounds_us[d] or _bound_us(devices[d])
    return bounds_us


def _bound_us(device: ModesOnDevice) -> float:
    if device.budget in (0, float("inf")):
        return 0.0
    return device.value_us(device.least_us("BW"), device.least_us("B"))


class Way(NamedTuple):
    """A variant of stage s."""

    s: int
    variant: Variant


@dataclass
class _Program:
    """A linear program in numbers of microbatches and times, none negative, that minimises the first, a time."""

    columns: int = 1
    limits: list[tuple[Mapping[int, float], float]] = field(default_factory=list)
    values: list[tuple[Mapping[int, float], float]] = field(default_factory=list)

    def column(self) -> int:
        """A new column."""
        self.columns += 1
        return self.columns - 1

    def at_most(self, terms: Mapping[int, float], limit: float) -> None:
        """The sum of coefficient times column is at most the limit."""
        self.limits.append((terms, limit))

    def at_least(self, terms: Mapping[int, float], limit: float) -> None:
        """The sum of coefficient times column is at least the limit."""
        self.limits.append(({column: -factor for column, factor in terms.items()}, -limit))

    def equal(self, terms: Mapping[int, float], value: float) -> None:
        """The sum of coefficient times column is the value."""
        self.values.append((terms, value))

    def least(self) -> float:
        """The least value of the first column, infinity where nothing fulfils the rows.

        0 where the solver would take a factor for nothing and the bound would so become too large: a negative one.
        """
        from scipy.optimize import linprog  # slow to load, and only for problems with modes

        (limited, limits), (equal, values) = self._rows(self.limits), self._rows(self.values)
        if np.any((limited < 0) & (limited > -SMALLEST)):
            return 0.0
        goal = np.eye(self.columns)[0]
        solved = linprog(goal, A_ub=limited, b_ub=limits, A_eq=equal, b_eq=values, method="highs")
        if solved.status == INFEASIBLE:
            return float("inf")
        return float(solved.fun) * (1 - ROUNDING) if solved.status == 0 else 0.0

    def _rows(self, rows: Sequence[tuple[Mapping[int, float], float]]) -> tuple[Floats, Floats]:
        matrix = np.zeros((len(rows), self.columns))
        for row, (terms, _) in zip(matrix, rows, strict=True):
            row[list(terms)] = list(terms.values())
        return matrix, np.array([limit for _, limit in rows])


INFEASIBLE = 2
"""The status of a program that nothing fulfils, as SciPy numbers it."""


class ModesOnDevice(OnDevice):
    """A device whose stages have activation modes."""

    def least_us(self, backward: Backward) -> float:
        """The least span up to the end of the last `backward`; 0 where nothing keeps the budget."""
        apart, *others = (self._program(backward, both).least() for both in (None, *self.numbers))
        least_us = min(apart, *others)
        return least_us if least_us < float("inf") else 0.0

    @cached_property
    def _ways(self) -> Sequence[Way]:
        return [Way(s, way) for s in self.numbers for way in fitting_variants(self.problem, s)]

    def _program(self, backward: Backward, both: int | None) -> _Program:
        """The program where all microbatches of stage `both` are in flight in the warm-up, or the cool-down, or both.

        None: where on no stage any is in both.
        """
        program = _Program()
        warm_up_us, cool_down_us = program.column(), program.column()
        numbers = {way: program.column() for way in self._ways}
        for s in self.numbers:
            program.equal({numbers[way]: 1 for way in self._ways if way.s == s}, self.problem.units)
        self._add_byte_time(program, numbers, backward)
        self._add_copies(program, numbers)
        early = self._add_warm_up(program, warm_up_us)
        late = self._add_cool_down(program, cool_down_us, backward)
        self._add_order(program, numbers, early, late, both)
        recomputed = {numbers[way]: -way.variant.mode.recompute_us for way in self._ways}
        work_us = self.problem.units * sum(stage.duration_us(kind) for stage in self.stages for kind in "F" + backward)
        together = [{warm_up_us, cool_down_us}] if self._windows_apart else [{warm_up_us}, {cool_down_us}]
        for idle in together:
            program.at_least({0: 1} | recomputed | dict.fromkeys(idle, -1), work_us)
        return program

    @property
    def _warm_up_us(self) -> float:
        """From the first op to the earliest start of a backward."""
        return self.stages[0].forward_us + self.paths.turnaround_us(self.numbers[0], self.numbers[-1])

    @property
    def _cool_down_us(self) -> float:
        """From the end of the last F to the earliest start of the last backward."""
        return self.paths.turnaround_us(self.numbers[-1], self.numbers[0])

    @property
    def _windows_apart(self) -> bool:
        """True if both windows have no time in common: else all F, and no backward, would have ended in the first."""
        forwards_us = self.problem.units * sum(stage.forward_us for stage in self.stages)
        least = [min(way.variant.waiting_bytes for way in self._ways if way.s == s) for s in self.numbers]
        return forwards_us > self._warm_up_us or self.problem.units * sum(least) > self.budget

    @property
    def _copies(self) -> bool:
        return any(way.variant.moved_bytes for way in self._ways)

    def _add_byte_time(self, program: _Program, numbers: Mapping[Way, int], backward: Backward) -> None:
        """Byte-time: the least use of all microbatches is within the budget, integrated over the span."""
        later_us = max(stage.backward_weight_us for stage in self.stages) if backward == "B" else 0.0
        sizes = [max(way.variant.backward_bytes for way in self._ways if way.s == s) for s in self.numbers]
        unused_us = _unused_byte_us(self, self.budget, sizes, backward) / self.budget
        used_us = {numbers[way]: self._byte_us(way) / self.budget for way in self._ways}
        program.at_most(used_us | {0: -1}, later_us - unused_us)

    def _byte_us(self, way: Way) -> float:
        """The least byte-time of one microbatch in a variant."""
        stage, variant = self.problem.stages[way.s], way.variant
        mode, way_us = variant.mode, self.paths.turnaround_us(way.s, way.s)
        backward_us = stage.backward_input_us + (mode.recompute_us if variant.inside else 0)
        kept = mode.kept_bytes * (stage.forward_us + way_us + backward_us)
        made_us = backward_us + (0 if variant.inside else mode.recompute_us)
        made = (variant.backward_bytes - mode.kept_bytes) * made_us
        weight = min(variant.backward_bytes, stage.backward_weight_bytes) * stage.backward_weight_us
        copy = mode.offload
        away = copy.bytes * max(0.0, way_us - copy.offload_us - copy.reload_us) if copy else 0.0
        return kept + made + weight - away

    def _add_copies(self, program: _Program, numbers: Mapping[Way, int]) -> None:
        """The copies of a channel follow one another."""
        for kinds in self._directions:
            copy_us = {numbers[way]: _copy_us(way, kinds) for way in self._ways if way.variant.moved_bytes}
            if copy_us:
                program.at_most(copy_us | {0: -1}, 0)

    @property
    def _directions(self) -> Sequence[str]:
        return ["O", "R"] if self.problem.copy_channels.duplex else ["OR"]

    def _add_warm_up(self, program: _Program, idle_us: int) -> Mapping[Way, Sequence[int]]:
        """Columns of the microbatches whose F begins in the warm-up, by what has been done with them in it.

        They wait as F left them, they have left to the host, or their C has begun.
        """
        early: dict[Way, list[int]] = defaultdict(list)
        work_us, at_end, at_last = {idle_us: 1.0}, {}, {}
        copy_us: dict[str, dict[int, float]] = {kinds: {} for kinds in self._directions}
        for way in self._ways:
            stage, variant = self.problem.stages[way.s], way.variant
            states = {"waiting": variant.mode.kept_bytes}
            if variant.moved_bytes:
                states["left"] = variant.waiting_bytes
            if variant.ahead:
                states["made"] = variant.backward_bytes
            for state, size in states.items():
                column = program.column()
                early[way].append(column)
                at_end[column] = size
                at_last[column] = size if state == "waiting" else variant.waiting_bytes
                work_us[column] = stage.forward_us + (variant.mode.recompute_us if state == "made" else 0)
                for kinds, times_us in copy_us.items():
                    if state != "waiting" and variant.moved_bytes:
                        times_us[column] = _copy_us(way, kinds if state == "made" else kinds.replace("R", ""))
        program.at_least(work_us, self._warm_up_us)
        program.at_most(at_end, self.budget)
        program.at_most(at_last, self.budget - min(map(self._beside_forward, self._ways)))
        for times_us in copy_us.values():
            program.at_most(times_us, self._warm_up_us)
        return early

    def _beside_forward(self, way: Way) -> int:
        """Bytes that F takes beside what it leaves."""
        return way.variant.mode.forward_workspace_bytes + self.problem.stages[way.s].workspace_bytes.F

    def _add_cool_down(self, program: _Program, idle_us: int, backward: Backward) -> Mapping[Way, Sequence[int]]:
        """Columns of the microbatches in flight when the cool-down begins, or without copies when the last F starts.

        `idle_us` is idle time in the cool-down; up to the last B, with the time of the W that come before its end.
        """
        late: dict[Way, list[int]] = defaultdict(list)
        held: dict[int, float] = {}
        work_us, weight_us, reload_us = {idle_us: 1.0}, {idle_us: 1.0}, {}
        low, high, copies = self.numbers[0], self.numbers[-1], self._copies
        all_weights_us = 0.0
        for s, stage in zip(self.numbers, self.stages, strict=True):
            backward_us, late_us = stage.duration_us("B"), stage.duration_us("W")
            last_is_there = s == low or not copies  # surely, the last microbatch before its B
            pending = program.column()
            held[pending], work_us[pending], weight_us[pending] = stage.backward_weight_bytes, late_us, late_us
            before: list[int] = []
            last: list[int] = []
            for way in (way for way in self._ways if way.s == s):
                mode = way.variant.mode
                for is_last, away in product(
                    (False, True)[: 1 + last_is_there], (False, True)[: 1 + bool(mode.offload)]
                ):
                    column = program.column()
                    (last if is_last else before).append(column)
                    held[column] = way.variant.waiting_bytes if away else mode.kept_bytes
                    if away:
                        reload_us[column] = _copy_us(way, "R")
                    if is_last and s == high and not copies:
                        held[column] += self._beside_forward(way)
                    work_us[column] = mode.recompute_us
                    if not is_last or s != low:
                        work_us[column] += backward_us + (late_us if backward == "BW" or not is_last else 0)
                    if not is_last:
                        weight_us[column] = late_us
                    late[way].append(column)
            others = self.problem.units - last_is_there
            program.at_most(dict.fromkeys([pending, *before], 1), others)
            if last_is_there:
                program.equal(dict.fromkeys(last, 1), 1)
            all_weights_us += others * late_us
        program.at_most(held, self.budget)
        program.at_most(reload_us, self._cool_down_us)
        if backward == "BW":
            program.at_least(work_us, self._cool_down_us)
        else:
            program.at_least(weight_us, all_weights_us)
            program.at_least(work_us, all_weights_us + self._cool_down_us)
            program.at_least({idle_us: 1}, self._weights_that_do_not_fit_us)
        return late

    @property
    def _weights_that_do_not_fit_us(self) -> float:
        """All W but the last of the first stage, less the most that can be pending when the last backward starts."""
        activation = min(way.variant.backward_bytes for way in self._ways if way.s == self.numbers[0])
        weights = [Held(Piece(stage.backward_weight_us, stage.backward_weight_bytes)) for stage in self.stages]
        fitting_us = most_held_us(weights, self.problem.units, self.budget - activation)
        all_us = self.problem.units * sum(stage.backward_weight_us for stage in self.stages)
        return all_us - self.stages[0].backward_weight_us - fitting_us

    def _add_order(
        self,
        program: _Program,
        numbers: Mapping[Way, int],
        early: Mapping[Way, Sequence[int]],
        late: Mapping[Way, Sequence[int]],
        both: int | None,
    ) -> None:
        """No more microbatches of a variant are in flight in the windows than there are."""
        counted: dict[int, float] = {}  # on stage `both`, those in flight in either window less those in both
        for way in self._ways:
            windows = (early[way], late[way])
            if both is None:
                program.at_most(dict.fromkeys([*early[way], *late[way]], 1) | {numbers[way]: -1}, 0)
                continue
            for window in windows:
                program.at_most(dict.fromkeys(window, 1) | {numbers[way]: -1}, 0)
            if way.s == both:
                twice = program.column()
                counted |= {twice: -1} | dict.fromkeys([*early[way], *late[way]], 1)
                program.at_most({twice: -1, numbers[way]: -1} | dict.fromkeys([*early[way], *late[way]], 1), 0)
                for window in windows:
                    program.at_most({twice: 1} | dict.fromkeys(window, -1), 0)
        if both is not None:
            program.equal(counted, self.problem.units)
            # All ops that begin in the warm-up end in it, but the last.
            times_us = {
                column: self.problem.stages[way.s].forward_us for way, columns in early.items() for column in columns
            }
            program.at_most(times_us, self._warm_up_us + max(stage.forward_us for stage in self.stages))


def _unused_byte_us(device: OnDevice, budget: float, sizes_bytes: Sequence[int], backward: str) -> float:
    """Byte-time of a budget that cannot be used near the ends of a span, `sizes_bytes` being the most of each stage.

    One activation may be there at once, and others as fast as F take or backwards free them. Ramps that overlapped
    would count the same byte-time twice; a span of at least the work excludes it.
    """
    room = max(0, budget - max(sizes_bytes))
    lengths_us = []
    for kind in ("F", backward):
        times_us = [stage.duration_us(kind) for stage in device.stages]
        rate = max(
            size / time_us if time_us else float("inf") for size, time_us in zip(sizes_bytes, times_us, strict=True)
        )
        lengths_us.append(room / rate if rate else float("inf"))
    work_us = sum(stage.duration_us(kind) for stage in device.stages for kind in ("F", backward))
    return room / 2 * sum(lengths_us) if sum(lengths_us) <= device.problem.units * work_us else 0.0


def _copy_us(way: Way, kinds: str) -> float:
    """The copies of one microbatch in the directions of `kinds`, O and R."""
    copy = way.variant.mode.offload
    times_us = {"O": copy.offload_us, "R": copy.reload_us} if copy else {}
    return sum(times_us.get(kind, 0) for kind in kinds)
