"""One window of a schedule as a constraint model: what starts in it is decided anew, all else follows in its order."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from optpipe.orders import DeviceOrders, Op, Orders
from optpipe.schedule import shared_channels
from optpipe.waits import derive_waits
from solver.exact.cp_sat.variables import Moment
from solver.search.windows_frame import AFTER, BEFORE, Frame, Window
from solver.search.windows_memory import Memory
from solver.search.windows_surroundings import NEVER, Ints, Surroundings
from solver.search.windows_tasks import Tasks


class WindowModel:
    """The model of a window; `orders` reads a solution."""

    def __init__(self, around: Surroundings, window: Window) -> None:
        self.around, self.window = around, window
        self.frame = Frame(around, window)
        self.tasks = Tasks(self.frame)
        self.numbering, self.problem = around.numbering, self.frame.problem
        self.variables, self.model, self.decided = self.tasks.variables, self.tasks.model, self.tasks.decided
        self._add_rules()
        self._add_copy_orders()
        self._add_compute()
        self._add_channels()
        memory = Memory(self.tasks)
        memory.add_device_memory()
        memory.add_host_memory()
        self._add_objective()
        self._add_hints()

    def _add_rules(self) -> None:
        """Precedences between ops of the window; those of a copy hold if there is one."""
        ops, leaves = self.numbering.ops, self.variables.leaves
        decided = np.zeros(len(ops), bool)
        decided[list(self.decided)] = True
        rules = self.numbering.rules
        for before, after, delay in rules[decided[rules[:, 0]] & decided[rules[:, 1]]].tolist():
            copies = [op for op in (ops[before], ops[after]) if op.kind in "OR"]
            if len(copies) == 2 and copies[0].kind == copies[1].kind:
                continue  # in _add_copy_orders: a microbatch between may stay
            rule = self.model.add(self.tasks.of(after).start >= self.tasks.of(before).end + delay)
            if copies:
                rule.only_enforce_if(leaves[copies[0][1:]])

    def _add_copy_orders(self) -> None:
        """Copies of one stage keep the order of their microbatches (absent ones take no time in it)."""
        streams = defaultdict(list)
        for op in sorted(self.numbering.ops[k] for k in self.decided):
            if op.kind in "OR":
                streams[op.kind, op.stage].append(op)
        for stream in streams.values():
            for before, after in pairwise(stream):
                one, other = self.variables.tasks[before], self.variables.tasks[after]
                self.model.add(other.start >= one.start + one.ticks * self.variables.leaves[before[1:]])

    def _add_compute(self) -> None:
        """Devices run one op at a time; ops that are not free stay in order."""
        for compute, *_ in self.around.streams:
            mine = [int(k) for k in compute if k in self.decided]
            kept = [k for k in mine if not self.window.free[k]]
            for one, other in pairwise(kept):
                self.model.add(self.tasks.of(other).start >= self.tasks.of(one).end)
            if len(kept) < len(mine):
                self.model.add_no_overlap([self.tasks.of(k).interval for k in mine])

    def _add_channels(self) -> None:
        """A channel carries one transfer at a time."""
        ops = self.numbering.ops
        for group in self.problem.channel_groups:
            moving = [k for k in sorted(self.decided) if ops[k].kind in "OR" and self.numbering.device[k] in group]
            for kinds in ("O", "R") if self.problem.copy_channels.duplex else ("OR",):
                self.model.add_no_overlap([self.tasks.of(k).interval for k in moving if ops[k].kind in kinds])

    def _add_objective(self) -> None:
        """The value first, then the sum of the devices' ends: it is what later windows can build on."""
        model, value, tails = self.model, self.variables.objective, self.frame.tails
        ends = [model.new_int_var(0, 2 * self.frame.last_end, f"end{d}") for d in range(len(self.problem.devices))]
        for d, stages in enumerate(self.problem.stages_of):
            if stages:
                model.add(value >= ends[d] - self._begin(stages[0]))
        for k in sorted(self.decided):
            task, op = self.tasks.of(k), self.numbering.ops[k]
            for d in np.flatnonzero(tails[:, k] > NEVER // 2).tolist():
                rule = model.add(ends[d] >= task.end + int(tails[d, k]))
                if op.kind in "OR":
                    rule.only_enforce_if(self.variables.leaves[op.stage, op.microbatch])
        model.minimize((len(ends) + 1) * value + sum(ends))

    def _begin(self, low: int) -> cp_model.IntVar | int:
        """When the time of a device whose lowest stage is `low` begins to count."""
        if self.problem.objective == "makespan":
            return 0
        first = self.numbering.index[Op("F", low, 0)]
        return self.tasks.of(first).start if first in self.decided else int(self.around.start[first])

    def _add_hints(self) -> None:
        """The window as it is, whole, so that the solver need not search for the rest."""
        around, index, model = self.around, self.numbering.index, self.model
        starts = {k: int(around.start[k] if around.present[k] else self.frame.heads[k]) for k in self.decided}
        for k, start in starts.items():
            model.add_hint(self.tasks.of(k).start, start)
        for s, i in self.tasks.choices:
            model.add_hint(self.variables.leaves[s, i], bool(around.present[index[Op("O", s, i)]]))
        for length, first, last, least in self.variables.lengths:
            begin, end = (self._at(moment, starts) for moment in (first, last))
            model.add_hint(length, max(end - begin, least))

    def _at(self, moment: Moment, starts: dict[int, int]) -> int:
        k = self.numbering.index[moment.task.op]
        return moment.at(starts[k]) if k in starts else self.tasks.fixed(moment)

    def orders(self, solver: cp_model.CpSolver) -> Orders | None:
        """The orders of a solution, with everything after the window behind it; None where nothing has changed."""
        ops, around = self.numbering.ops, self.around
        start, present = around.start.copy(), around.present.copy()
        for k in self.decided:
            op = ops[k]
            start[k] = solver.value(self.tasks.of(k).start)
            present[k] = op.kind not in "OR" or solver.boolean_value(self.variables.leaves[op.stage, op.microbatch])
        inside = np.array([k for k in self.decided if present[k]], np.int64)
        if (start[inside] == around.start[inside]).all() and (present == around.present).all():
            return None
        inside = inside[np.argsort(start[inside], kind="stable")]
        start[self._after()] += max(0, int((start + self.numbering.length)[inside].max()) - self.window.end)
        return self._orders_of(inside, start)

    def _after(self) -> Ints:
        after: Ints = np.flatnonzero(self.around.present & (self.frame.where == AFTER))
        return after

    def _orders_of(self, inside: Ints, start: Ints) -> Orders:
        """What is before the window in its old order, what is inside in the order given, then what is after."""
        ops, problem = self.numbering.ops, self.problem
        devices = []
        planned: dict[Op, tuple[int, int]] = {}
        for d, device in enumerate(self.around.streams):
            mine = inside[self.numbering.device[inside] == d]
            lists = []
            for x, old in enumerate(device):
                numbers = self._put_between(old, mine[self.numbering.stream[mine] == x])
                lists.append([ops[k] for k in numbers])
                begins = start[numbers]
                ends = begins + self.numbering.length[numbers]
                planned.update(zip(lists[-1], zip(begins.tolist(), ends.tolist(), strict=True), strict=True))
            devices.append(DeviceOrders(*lists))
        channels = [
            sorted((op for d, stream in lists for op in getattr(devices[d], stream)), key=planned.__getitem__)
            for lists in shared_channels(problem)
        ]
        return Orders(devices, derive_waits(problem, devices, planned), [channel for channel in channels if channel])

    def _put_between(self, old: Ints, inside: Ints) -> list[int]:
        where = self.frame.where[old]
        return [*old[where == BEFORE].tolist(), *inside.tolist(), *old[where == AFTER].tolist()]
