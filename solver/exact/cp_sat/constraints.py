"""Constraints of the CP-SAT model, one method a family: rules, memory, cuts (docs/math/cp-sat.md).

A disjunctive constraint for each device and channel and a cumulative constraint for each memory (Baptiste, Le Pape and
Nuijten, *Constraint-Based Scheduling*, 2001): unlike the mixed-integer program of Zero Bubble (appendix G) and OptPipe
(section 4) the model has no binary for each pair of ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple

from ortools.sat.python import cp_model

from solver.exact.cp_sat.variables import IntervalTask, Moment, Variables
from solver.exact.rules import least_work_around, like_pairs


class Held(NamedTuple):
    """A number of bytes held from one moment to another, if `presence` (None: always); for `least` ticks at least."""

    size: int
    first: Moment
    last: Moment
    presence: cp_model.BoolVarT | None = None
    least: int = 0


def held(variables: Variables, s: int, i: int) -> Iterator[Held]:
    """All pieces of microbatch i on stage s.

    A part is freed at B's end, the rest at W's end. If B holds more after its end than before, the difference
    counts from B's start: no wait could keep B from ending before another op has freed memory. A fused backward frees
    all at its end, and has a workspace of its own.
    """
    stage, leaves = variables.problem.stages[s], variables.leaves.get((s, i))
    forward, backward, weight = (variables.task(kind, s, i) for kind in "FBW")
    kept = min(stage.backward_weight_bytes, stage.activation_bytes)
    freed_by_backward = stage.activation_bytes - kept
    moved = stage.offload.bytes if leaves is not None and stage.offload else 0
    moved_early = min(moved, freed_by_backward)
    grown = stage.backward_weight_bytes - kept
    fused, work, both = variables.fused.get((s, i)), stage.workspace_bytes, backward.ticks + weight.ticks
    split = None if fused is None else ~fused
    pieces = [
        *_activation(variables, s, i, "B", freed_by_backward, moved_early),
        *_activation(variables, s, i, "BW", kept, moved - moved_early),
        Held(grown, hold_start(backward), hold_end(weight), split, both),
        Held(work.F, hold_start(forward), hold_end(forward)),
        Held(max(work.B - grown, 0), hold_start(backward), hold_end(backward), split),  # `grown` counts from B's start
        Held(work.W, hold_start(weight), hold_end(weight), split),
    ]
    if fused is not None:
        # The model keeps B and W as two tasks; fused, what B would free stays until W ends.
        pieces.append(Held(freed_by_backward, hold_start(weight), hold_end(weight), fused))
        pieces.append(Held(work.BW, hold_start(backward), hold_end(weight), fused, both))
    return (piece for piece in pieces if piece.size > 0)


def _activation(variables: Variables, s: int, i: int, until: str, size: int, moved: int) -> Iterator[Held]:
    """Bytes held from F's start to the end of `until`'s last op, of which `moved` may be away between O and R."""
    forward, last = variables.task("F", s, i), variables.task(until[-1], s, i)
    back = sum(variables.length(kind, s) for kind in until)
    # No activation lives for less than the round trip through the stages behind and its backward: with this least
    # length the cumulative constraint can reason about energy (bytes times ticks) before any start is fixed.
    life = variables.round_trips[s] + back
    yield Held(size - moved, hold_start(forward), hold_end(last), None, life)
    if moved:
        leaves = variables.leaves[s, i]
        offload, reload = variables.task("O", s, i), variables.task("R", s, i)
        yield Held(moved, hold_start(forward), hold_end(last), ~leaves, life)
        yield Held(moved, hold_start(forward), hold_end(offload), leaves, forward.ticks + offload.ticks)
        yield Held(moved, hold_start(reload), hold_end(last), leaves, reload.ticks + back)


def hold_start(task: IntervalTask) -> Moment:
    """The moment at which a task starts."""
    return Moment(task, is_end=False)


def hold_end(task: IntervalTask) -> Moment:
    """The moment at which a task ends."""
    return Moment(task, is_end=True)


class Constraints:
    """Adds every rule of the contract to the model of `variables`."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self.model = variables.model
        self.problem = variables.problem
        self.task = variables.task

    def add_all(self) -> None:
        """All families."""
        self.dataflow()
        self.microbatch_order()
        self.fused_backwards()
        self.offload_round_trip()
        self.one_op_at_a_time()
        self.channels()
        self.device_memory()
        self.host_memory()

    def dataflow(self) -> None:
        """F and B wait for the neighbouring stage and its transfer, B for F, W for B (Zero Bubble, appendix G)."""
        ticks = self.variables.grid.ticks
        last = len(self.problem.stages) - 1
        for s in range(last + 1):
            for i in range(self.problem.microbatches):
                forward, backward, weight = (self.task(kind, s, i) for kind in "FBW")
                self._after(backward, forward)
                self._after(weight, backward)
                if s < last:
                    self._after(self.task("F", s + 1, i), forward, ticks(self.problem.forward_delay_us[s]))
                    self._after(backward, self.task("B", s + 1, i), ticks(self.problem.backward_delay_us[s]))

    def _after(self, task: IntervalTask, before: IntervalTask, delay: int = 0) -> None:
        self.model.add(task.start >= before.end + delay)

    def microbatch_order(self) -> None:
        """Microbatches keep their order within one op type of one stage (absent transfers take no time in it)."""
        for s in range(len(self.problem.stages)):
            for i in range(1, self.problem.microbatches):
                for kind in "FB" if (s, i) in self.variables.fused else "FBW":
                    self._after(self.task(kind, s, i), self.task(kind, s, i - 1))
                if (s, i) in self.variables.leaves:
                    # The start of an absent copy stays a variable, so the chain holds through it: were it skipped,
                    # copies on its two sides would need a rule of their own for each pair.
                    for kind in "OR":
                        before = self.task(kind, s, i - 1)
                        length = before.ticks * self.variables.leaves[s, i - 1]
                        self.model.add(self.task(kind, s, i).start >= before.start + length)

    def fused_backwards(self) -> None:
        """A fused backward is W right behind B and hands its gradient over at the end of W.

        It is one op, BW, and so not part of the order of W (docs/adr/0006).
        """
        delays_us = self.problem.backward_delay_us
        for (s, i), fused in self.variables.fused.items():
            backward, weight = self.task("B", s, i), self.task("W", s, i)
            self.model.add(weight.start == backward.end).only_enforce_if(fused)
            if s > 0:
                handed_over = weight.end + self.variables.grid.ticks(delays_us[s - 1])
                self.model.add(self.task("B", s - 1, i).start >= handed_over).only_enforce_if(fused)
            for j in range(i):
                both_split = (~fused, ~self.variables.fused[s, j])
                self.model.add(weight.start >= self.task("W", s, j).end).only_enforce_if(both_split)

    def offload_round_trip(self) -> None:
        """O after F, R after O, B after R, where the activation leaves (OptPipe, section 4)."""
        for (s, i), leaves in self.variables.leaves.items():
            for before, after in pairwise(self.task(kind, s, i) for kind in "FORB"):
                self.model.add(after.start >= before.end).only_enforce_if(leaves)

    def one_op_at_a_time(self) -> None:
        """A device runs one compute op at a time."""
        for stages in self.problem.stages_of:
            tasks = [self.task(kind, s, i) for s in stages for i in range(self.problem.microbatches) for kind in "FBW"]
            self.model.add_no_overlap([task.interval for task in tasks])

    def channels(self) -> None:
        """A channel carries one transfer at a time; devices behind one switch, or both directions, may share it."""
        for group in self.problem.channel_groups:
            moving = [(s, i) for s, i in self.variables.leaves if self.problem.stages[s].device in group]
            directions = ["O", "R"] if self.problem.copy_channels.duplex else ["OR"]
            for kinds in directions:
                self.model.add_no_overlap([self.task(kind, s, i).interval for s, i in moving for kind in kinds])

    def device_memory(self) -> None:
        """Activations and workspace stay within each device's budget.

        The level rises only at starts, and at an instant ends count before starts, as intervals that are open at their
        end do.
        """
        for d, stages in enumerate(self.problem.stages_of):
            budget = self.problem.devices[d].memory_bytes
            if budget is not None:
                microbatches = range(self.problem.microbatches)
                pieces = [piece for s in stages for i in microbatches for piece in held(self.variables, s, i)]
                intervals = [
                    piece.first.task.interval  # a workspace: the op's own interval serves
                    if piece.first.task is piece.last.task and piece.presence is None
                    else self.variables.span(f"held{d}.{n}", piece.first, piece.last, piece.presence, piece.least)
                    for n, piece in enumerate(pieces)
                ]
                self.model.add_cumulative(intervals, [piece.size for piece in pieces], budget)

    def host_memory(self) -> None:
        """The host holds what is away, from O's start to R's end, all devices together."""
        limit = self.problem.host_memory_bytes
        if limit is None or not self.variables.leaves:
            return
        intervals, sizes = [], []
        for (s, i), leaves in self.variables.leaves.items():
            offload = self.problem.stages[s].offload
            assert offload is not None
            first, last = hold_start(self.task("O", s, i)), hold_end(self.task("R", s, i))
            intervals.append(self.variables.span(f"host{s}.{i}", first, last, leaves))
            sizes.append(offload.bytes)
        self.model.add_cumulative(intervals, sizes, limit)


SLACK = 1e-6
"""Ticks by which float sums may exceed a whole number."""


def add_work_that_memory_holds_back(variables: Variables) -> None:
    """An op begins no sooner than its device can have done what it must, and leaves time for what is left.

    An interval model propagates memory and the order of a device apart from one another. Together they say more: a
    device can only run ahead, and only put off work, as far as its memory goes (docs/math/bounds.md). The cuts hold for
    the memory of split backwards: devices that may fuse some are left out.
    """
    problem, model = variables.problem, variables.model
    fusing = {problem.stages[s].device for s in variables.fusing_stages}
    for op, before, after in least_work_around(problem, variables.length):
        if problem.stages[op.stage].device in fusing:
            continue
        task = variables.tasks[op]
        begin = variables.task("F", problem.stages_of[problem.stages[op.stage].device][0], 0).start
        if before < inf:
            model.add(task.start >= begin + ceil(before - SLACK))
        counted_from = begin if problem.objective == "device_span" else 0
        model.add(variables.objective >= task.start - counted_from + ceil(after - SLACK))


def add_weight_order(variables: Variables) -> None:
    """W of like stages run in the order of their B, where none is fused with it: a symmetry (`solver.exact.rules`).

    Each schedule has an equal one in which this holds, so that the others need not be searched or excluded.
    """
    model = variables.model
    for pairs in like_pairs(variables.problem, variables.fusing_stages):
        first = model.new_bool_var(f"{pairs[0][0]}first{pairs[0][1]}")
        variables.firsts.append((first, *pairs[1]))
        for pair in pairs:
            one, other = (variables.tasks[op] for op in pair)
            model.add(other.start >= one.end).only_enforce_if(first)
            model.add(one.start >= other.end).only_enforce_if(~first)
