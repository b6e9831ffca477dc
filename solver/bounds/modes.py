"""Bounds with activation modes: the cheapest mix of variants that byte-time, both windows, compute and copies allow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import product
from math import ceil
from typing import Literal, NamedTuple

import numpy as np

from optpipe.problem import Problem
from optpipe.task_graph import lower
from solver.bounds.device import OnDevice, most_held_us
from solver.bounds.linear_program import LinearProgram
from solver.variants import Variant, fitting_variants

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
    last F started, besides what this took; with copies when that time begins, and what was offloaded then comes back in
    it.

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


class StageVariant(NamedTuple):
    """A variant of stage s."""

    s: int
    variant: Variant


class ModesOnDevice(OnDevice):
    """A device whose stages have activation modes."""

    def least_us(self, backward: Backward) -> float:
        """The least span up to the end of the last `backward`; 0 where nothing keeps the budget."""
        apart, *others = (self._program(backward, both).least() for both in (None, *self.numbers))
        least_us = min(apart, *others)
        return least_us if least_us < float("inf") else 0.0

    @cached_property
    def _options(self) -> Sequence[StageVariant]:
        return [StageVariant(s, variant) for s in self.numbers for variant in fitting_variants(self.problem, s)]

    def _program(self, backward: Backward, both: int | None) -> LinearProgram:
        """The program where all microbatches of stage `both` are in flight in the warm-up, or the cool-down, or both.

        None: where on no stage any is in both.
        """
        program = LinearProgram()
        warm_up_us, cool_down_us = program.column(), program.column()
        numbers = {option: program.column() for option in self._options}
        for s in self.numbers:
            program.equal({numbers[option]: 1 for option in self._options if option.s == s}, self.problem.units)
        of_options_us = {numbers[option]: option.variant.mode.recompute_us for option in self._options}
        program.at_least(of_options_us, self.problem.units * self._forced_us)
        self._add_byte_time(program, numbers, backward)
        self._add_copies(program, numbers)
        early = self._add_warm_up(program, warm_up_us)
        late = self._add_cool_down(program, cool_down_us, backward)
        self._add_order(program, numbers, early, late, both)
        recomputed = {column: -us for column, us in of_options_us.items()}
        work_us = self.problem.units * sum(stage.duration_us(kind) for stage in self.stages for kind in "F" + backward)
        together = [{warm_up_us, cool_down_us}] if self._windows_apart else [{warm_up_us}, {cool_down_us}]
        for idle in together:
            program.at_least({0: 1} | recomputed | dict.fromkeys(idle, -1), work_us)
        return program

    @cached_property
    def _forced_us(self) -> float:
        """The least recomputation of one microbatch on all stages together; 0 where nothing keeps the budget.

        While F and the backward of a stage run, it waits on those before.
        """
        front = [(0, 0.0)]
        for s in self.numbers:
            reached = []
            for option in (option for option in self._options if option.s == s):
                variant = option.variant
                forward = variant.mode.kept_bytes + self._forward_extra_bytes(option)
                room = self.budget - max(forward, variant.backward_bytes)
                waiting, us = variant.waiting_bytes, variant.mode.recompute_us
                reached += [(held + waiting, before_us + us) for held, before_us in front if held <= room]
            front = []
            for held, us in sorted(reached):
                if not front or us < front[-1][1]:
                    front.append((held, us))
        return front[-1][1] if front else 0.0

    @property
    def _warm_up_us(self) -> float:
        """From the first op to the earliest start of a backward."""
        return self.stages[0].forward_us + self.costs.turnaround_us(self.numbers[0], self.numbers[-1])

    @property
    def _cool_down_us(self) -> float:
        """From the end of the last F to the earliest start of the last backward."""
        return self.costs.turnaround_us(self.numbers[-1], self.numbers[0])

    @property
    def _windows_apart(self) -> bool:
        """True if both windows have no time in common: else all F, and no backward, would have ended in the first."""
        forwards_us = self.problem.units * sum(stage.forward_us for stage in self.stages)
        least = [min(option.variant.waiting_bytes for option in self._options if option.s == s) for s in self.numbers]
        return forwards_us > self._warm_up_us or self.problem.units * sum(least) > self.budget

    @property
    def _copies(self) -> bool:
        return any(option.variant.moved_bytes for option in self._options)

    def _add_byte_time(self, program: LinearProgram, numbers: Mapping[StageVariant, int], backward: Backward) -> None:
        """Byte-time: the least use of all microbatches is within the budget, integrated over the span."""
        later_us = max(stage.backward_weight_us for stage in self.stages) if backward == "B" else 0.0
        sizes = [max(option.variant.backward_bytes for option in self._options if option.s == s) for s in self.numbers]
        unused_us = _unused_byte_us(self, self.budget, sizes, backward) / self.budget
        used_us = {numbers[option]: self._byte_us(option) / self.budget for option in self._options}
        program.at_most(used_us | {0: -1}, later_us - unused_us)

    def _byte_us(self, option: StageVariant) -> float:
        """The least byte-time of one microbatch in a variant."""
        stage, variant = self.problem.stages[option.s], option.variant
        mode, turnaround_us = variant.mode, self.costs.turnaround_us(option.s, option.s)
        backward_us = stage.backward_input_us + (mode.recompute_us if variant.inside else 0)
        kept = mode.kept_bytes * (stage.forward_us + turnaround_us + backward_us)
        made_us = backward_us + (0 if variant.inside else mode.recompute_us)
        made = (variant.backward_bytes - mode.kept_bytes) * made_us
        weight = min(variant.backward_bytes, stage.backward_weight_bytes) * stage.backward_weight_us
        copy = mode.offload
        offloaded = copy.bytes * max(0.0, turnaround_us - copy.offload_us - copy.reload_us) if copy else 0.0
        return kept + made + weight - offloaded

    def _add_copies(self, program: LinearProgram, numbers: Mapping[StageVariant, int]) -> None:
        """The copies of a channel follow one another."""
        for kinds in self._channel_kinds:
            copy_us = {
                numbers[option]: _copy_us(option, kinds) for option in self._options if option.variant.moved_bytes
            }
            if copy_us:
                program.at_most(copy_us | {0: -1}, 0)

    @property
    def _channel_kinds(self) -> Collection[Sequence[str]]:
        return dict.fromkeys(kinds for _, kinds in lower(self.problem).channels)

    def _add_warm_up(self, program: LinearProgram, idle_us: int) -> Mapping[StageVariant, Sequence[int]]:
        """Columns of the microbatches whose F begins in the warm-up, by what has been done with them in it.

        They wait as F left them, they have left to the host, or their C has begun.
        """
        early: dict[StageVariant, list[int]] = defaultdict(list)
        work_us, at_end, at_last = {idle_us: 1.0}, {}, {}
        copy_us: dict[Sequence[str], dict[int, float]] = {kinds: {} for kinds in self._channel_kinds}
        for option in self._options:
            stage, variant = self.problem.stages[option.s], option.variant
            states = {"waiting": variant.mode.kept_bytes}
            if variant.moved_bytes:
                states["left"] = variant.waiting_bytes
            if variant.ahead:
                states["made"] = variant.backward_bytes
            for state, size in states.items():
                column = program.column()
                early[option].append(column)
                at_end[column] = size
                at_last[column] = size if state == "waiting" else variant.waiting_bytes
                work_us[column] = stage.forward_us + (variant.mode.recompute_us if state == "made" else 0)
                for kinds, times_us in copy_us.items():
                    if state != "waiting" and variant.moved_bytes:
                        times_us[column] = _copy_us(option, [kind for kind in kinds if kind == "O" or state == "made"])
        program.at_least(work_us, self._warm_up_us)
        program.at_most(at_end, self.budget)
        program.at_most(at_last, self.budget - min(map(self._forward_extra_bytes, self._options)))
        for times_us in copy_us.values():
            program.at_most(times_us, self._warm_up_us)
        return early

    def _forward_extra_bytes(self, option: StageVariant) -> int:
        """Bytes that F takes on top of what it leaves."""
        return option.variant.mode.forward_workspace_bytes + self.problem.stages[option.s].workspace_bytes.F

    def _add_cool_down(
        self, program: LinearProgram, idle_us: int, backward: Backward
    ) -> Mapping[StageVariant, Sequence[int]]:
        """Columns of the microbatches in flight when the cool-down begins, or without copies when the last F starts.

        `idle_us` is idle time in the cool-down; up to the last B, with the time of the W that come before its end.
        """
        late: dict[StageVariant, list[int]] = defaultdict(list)
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
            for option in (option for option in self._options if option.s == s):
                mode = option.variant.mode
                for is_last, offloaded in product(
                    (False, True)[: 1 + last_is_there], (False, True)[: 1 + bool(mode.offload)]
                ):
                    column = program.column()
                    (last if is_last else before).append(column)
                    held[column] = option.variant.waiting_bytes if offloaded else mode.kept_bytes
                    if offloaded:
                        reload_us[column] = _copy_us(option, "R")
                    if is_last and s == high and not copies:
                        held[column] += self._forward_extra_bytes(option)
                    work_us[column] = mode.recompute_us
                    if not is_last or s != low:
                        work_us[column] += backward_us + (late_us if backward == "BW" or not is_last else 0)
                    if not is_last:
                        weight_us[column] = late_us
                    late[option].append(column)
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
        activation = min(option.variant.backward_bytes for option in self._options if option.s == self.numbers[0])
        nothing = np.zeros_like(self.weight)
        fitting_us = most_held_us(self.weight, nothing, self.left, nothing, self.budget - activation)
        all_us = self.problem.units * sum(stage.backward_weight_us for stage in self.stages)
        return all_us - self.stages[0].backward_weight_us - fitting_us

    def _add_order(
        self,
        program: LinearProgram,
        numbers: Mapping[StageVariant, int],
        early: Mapping[StageVariant, Sequence[int]],
        late: Mapping[StageVariant, Sequence[int]],
        both: int | None,
    ) -> None:
        """No more microbatches of a variant are in flight in the windows than there are."""
        counted: dict[int, float] = {}  # on stage `both`, those in flight in either window less those in both
        for option in self._options:
            windows = (early[option], late[option])
            if both is None:
                program.at_most(dict.fromkeys([*early[option], *late[option]], 1) | {numbers[option]: -1}, 0)
                continue
            for window in windows:
                program.at_most(dict.fromkeys(window, 1) | {numbers[option]: -1}, 0)
            if option.s == both:
                twice = program.column()
                counted |= {twice: -1} | dict.fromkeys([*early[option], *late[option]], 1)
                program.at_most({twice: -1, numbers[option]: -1} | dict.fromkeys([*early[option], *late[option]], 1), 0)
                for window in windows:
                    program.at_most({twice: 1} | dict.fromkeys(window, -1), 0)
        if both is not None:
            program.equal(counted, self.problem.units)
            # All ops that begin in the warm-up end in it, but the last.
            times_us = {
                column: self.problem.stages[option.s].forward_us
                for option, columns in early.items()
                for column in columns
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


def _copy_us(option: StageVariant, kinds: Sequence[str]) -> float:
    """The copies of one microbatch in the directions of `kinds`, O and R."""
    copy = option.variant.mode.offload
    times_us = {"O": copy.offload_us, "R": copy.reload_us} if copy else {}
    return sum(times_us.get(kind, 0) for kind in kinds)
