"""The rules of the model, one method a family."""

from __future__ import annotations

from itertools import pairwise

from ortools.sat.python import cp_model

from solver.exact.cp_sat.memory import Held, end, held, start
from solver.exact.cp_sat.variables import Task, Variables


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
        """F and B wait for the neighbouring stage and its transfer, B for F, W for B."""
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

    def _after(self, task: Task, before: Task, delay: int = 0) -> None:
        self.model.add(task.start >= before.end + delay)

    def microbatch_order(self) -> None:
        """Microbatches keep their order within one op type of one stage (absent transfers take no time in it)."""
        for s in range(len(self.problem.stages)):
            for i in range(1, self.problem.microbatches):
                for kind in "FB" if (s, i) in self.variables.fused else "FBW":
                    self._after(self.task(kind, s, i), self.task(kind, s, i - 1))
                if (s, i) in self.variables.leaves:
                    for kind in "OR":
                        before = self.task(kind, s, i - 1)
                        length = before.ticks * self.variables.leaves[s, i - 1]
                        self.model.add(self.task(kind, s, i).start >= before.start + length)

    def fused_backwards(self) -> None:
        """A fused backward is W right behind B, and hands its gradient over at the end; it is no W in their order."""
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
        """O after F, R after O, B after R, where the activation leaves."""
        for (s, i), leaves in self.variables.leaves.items():
            way = [self.task(kind, s, i) for kind in "FORB"]
            for before, after in pairwise(way):
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
        """Activations and workspace stay within each device's budget."""
        for d, stages in enumerate(self.problem.stages_of):
            budget = self.problem.devices[d].memory_bytes
            if budget is not None:
                microbatches = range(self.problem.microbatches)
                pieces = [piece for s in stages for i in microbatches for piece in held(self.variables, s, i)]
                intervals = [self._interval(f"held{d}.{n}", piece) for n, piece in enumerate(pieces)]
                self.model.add_cumulative(intervals, [piece.size for piece in pieces], budget)

    def _interval(self, name: str, piece: Held) -> cp_model.IntervalVar:
        if piece.first.task is piece.last.task and piece.presence is None:
            return piece.first.task.interval
        return self.variables.span(name, piece.first, piece.last, piece.presence, piece.least)

    def host_memory(self) -> None:
        """The host holds what is away, from O's start to R's end, all devices together."""
        limit = self.problem.host_memory_bytes
        if limit is None or not self.variables.leaves:
            return
        intervals, sizes = [], []
        for (s, i), leaves in self.variables.leaves.items():
            offload = self.problem.stages[s].offload
            assert offload is not None
            first, last = start(self.task("O", s, i)), end(self.task("R", s, i))
            intervals.append(self.variables.span(f"host{s}.{i}", first, last, leaves))
            sizes.append(offload.bytes)
        self.model.add_cumulative(intervals, sizes, limit)
