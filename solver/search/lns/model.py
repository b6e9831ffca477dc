"""One window of a schedule as a CP-SAT model: the ops that start in it are scheduled anew (docs/math/search.md).

The ops before and after enter as heads and tails (Carlier 1982), so that the objective of a small model is the value of
the whole schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from optpipe.kinds import COPIES, KIND
from optpipe.memory import derive_waits
from optpipe.mode_names import OFFLOAD
from optpipe.ops import DeviceOrders, Op, OpArray, Orders
from optpipe.schedule import shared_channels
from optpipe.stage import Mode, UnitStage
from solver.exact.cp_sat.constraints import Held, held, held_by_pass, hold_end, hold_start
from solver.exact.cp_sat.variables import IntervalTask, Moment, OptionTasks, Variables
from solver.search.lns.neighbourhood import AFTER, BEFORE, INSIDE, NEVER, Frame, Surroundings, Window
from solver.variants import Variant, unit_variants


class WindowModel:
    """The model of a window; `orders` reads a solution."""

    def __init__(self, around: Surroundings, window: Window) -> None:
        self.around, self.window = around, window
        self.frame = Frame(around, window)
        self.tasks = Tasks(self.frame)
        self.numbering, self.problem = around.numbering, self.frame.problem
        self.variables, self.model, self.decided = self.tasks.variables, self.tasks.model, self.tasks.decided
        self._add_rules()
        self._add_options()
        self._add_whole_backwards()
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
            if any(self.numbering.has_modes(*ops[k][:2]) for k in (before, after)):
                continue  # in _add_ways and _add_copy_orders
            copies = [op for op in (ops[before], ops[after]) if op.kind in COPIES]
            if len(copies) == 2 and copies[0].kind == copies[1].kind:
                continue  # in _add_copy_orders: the copies of a microbatch between may be absent
            begin: cp_model.LinearExpr = 1 * self.tasks.of(after).start
            from_elsewhere = ops[before].stage > ops[after].stage or ops[before].kind in self.problem.pass_names
            if ops[after].kind == "B" and from_elsewhere:  # what is recomputed inside waits too
                options = self.variables.options.get(ops[after][1:], ())
                for option in options:
                    begin -= option.tasks["CB"].ticks * option.literal if "CB" in option.tasks else 0
            rule = self.model.add(begin >= self.tasks.of(before).end + delay)
            if copies:
                rule.only_enforce_if(leaves[copies[0][1:]])

    def _add_options(self) -> None:
        """O after F, R after O, C after both, B after them, in the option taken; B right behind its CB.

        Besides, what gates let O, R and C wait for.
        """
        index, gated = self.numbering.index, self.numbering.gated
        for (s, i), options in self.variables.options.items():
            for option in options:
                chain = [self.variables.task("F", s, i), *option.tasks.values(), self.variables.task("B", s, i)]
                for before, after in pairwise(chain):
                    self.model.add(after.start >= before.end).only_enforce_if(option.literal)
                for kind, task in option.tasks.items():
                    k = index[Op(kind, s, i)]
                    for j, delay in gated.get(k, ()) if k in self.decided else ():
                        if j in self.decided:
                            self.model.add(task.start >= self.tasks.of(j).end + delay).only_enforce_if(option.literal)
                if "CB" in option.tasks:
                    self.model.add(chain[-1].start == option.tasks["CB"].end).only_enforce_if(option.literal)

    def _add_whole_backwards(self) -> None:
        """W right behind B on stages that cannot split their backward."""
        for s, i in self.variables.fused:
            if self.numbering.index[Op("W", s, i)] in self.decided:
                self.model.add(self.variables.task("W", s, i).start == self.variables.task("B", s, i).end)

    def _add_copy_orders(self) -> None:
        """Copies and C of one stage keep the order of their units (absent ones take no time in it)."""
        streams = defaultdict(list)
        for k in sorted(self.decided):
            op = self.numbering.ops[k]
            if op.kind in ("O", "R", "C"):
                streams[op.kind, op.stage].append(self.tasks.parts(k))
        for stream in streams.values():
            for before, after in pairwise(stream):
                taken = sum(task.ticks * literal for literal, task in before if literal is not None)
                self.model.add(after[0][1].start >= before[0][1].start + taken)

    def _add_compute(self) -> None:
        """Devices run one op at a time; ops that are not free stay in order."""
        for d, (compute, *_) in enumerate(self.around.streams):
            kept = [k for k in compute.tolist() if k in self.decided and not self.window.free[k]]
            for before, after in pairwise(kept):
                self.model.add(self.tasks.of(after).start >= self.tasks.of(before).end)
            on_device = [
                k for k in sorted(self.decided) if self.numbering.device[k] == d and not self.numbering.stream[k]
            ]
            if len(kept) < len(on_device):
                self.model.add_no_overlap([task.interval for k in on_device for _, task in self.tasks.parts(k)])

    def _add_channels(self) -> None:
        """A channel carries one transfer at a time."""
        ops, device = self.numbering.ops, self.numbering.device
        for group, kinds in self.variables.graph.channels:
            moving = [k for k in sorted(self.decided) if ops[k].kind in kinds and device[k] in group]
            self.model.add_no_overlap([task.interval for k in moving for _, task in self.tasks.parts(k)])

    def _add_objective(self) -> None:
        """The value, and with a lower weight the sum of the devices' ends.

        Where the value stays, earlier ends leave slack from which a later window can gain. The weights do not put the
        value first in any case; a solution with a larger value is refused by the search.
        """
        model, value, tails = self.model, self.variables.objective, self.frame.tails
        ends = [model.new_int_var(0, 2 * self.frame.last_end, f"end{d}") for d in range(len(self.problem.devices))]
        for d, stages in enumerate(self.problem.stages_of):
            if stages:
                begins: list[cp_model.IntVar | int] = [0]
                if self.problem.objective != "makespan":  # with the first F of its lowest stage, or of a pass
                    passes = [one.name for one in self.variables.graph.passes if d in one.devices]
                    firsts = [
                        self.numbering.index[op] for op in (Op("F", stages[0], 0), *(Op(name, d, 0) for name in passes))
                    ]
                    begins = [
                        self.tasks.of(k).start if k in self.decided else int(self.around.start[k]) for k in firsts
                    ]
                for begin in begins:
                    model.add(value >= ends[d] - begin)
        for k in sorted(self.decided):
            for literal, task in self.tasks.parts(k):
                for d in np.flatnonzero(tails[:, k] > NEVER // 2).tolist():
                    rule = model.add(ends[d] >= task.end + int(tails[d, k]))
                    if literal is not None:
                        rule.only_enforce_if(literal)
        model.minimize((len(ends) + 1) * value + sum(ends))

    def _add_hints(self) -> None:
        """The window as it is: a complete hint, which CP-SAT takes as its first solution."""
        around, index, model = self.around, self.numbering.index, self.model
        starts = {k: int(around.start[k]) if around.present[k] else self.tasks.earliest(k) for k in self.decided}
        for k in sorted(self.decided):  # by stage, kind and order: an absent op comes after the one before it
            op = self.numbering.ops[k]
            behind = [j for j in range(k - int(self.numbering.place[k]), k) if j in starts]
            if op.kind in ("O", "R", "C") and not around.present[k] and behind:
                ends = starts[behind[-1]] + (around.length[behind[-1]] if around.present[behind[-1]] else 0)
                starts[k] = max(starts[k], int(ends))

        def at(moment: Moment) -> int:
            k = index[moment.task.op]
            return moment.at(starts[k]) if k in starts else self.tasks.fixed(moment)

        for k, start in starts.items():
            model.add_hint(self.tasks.of(k).start, start)
        for s, i in self.tasks.choices:
            model.add_hint(self.variables.leaves[s, i], bool(around.present[index[Op("O", s, i)]]))
        for options in self.variables.options.values():
            for n, option in enumerate(options) if len(options) > 1 else ():
                model.add_hint(option.literal, n == 0)
        for length, first, last, least in self.variables.lengths:
            model.add_hint(length, max(at(last) - at(first), least))

    def orders(self, solver: cp_model.CpSolver) -> Orders | None:
        """The orders of a solution, with everything after the window behind it; None where nothing has changed."""
        ops, around = self.numbering.ops, self.around
        start, present, length = around.start.copy(), around.present.copy(), around.length.copy()
        for k in self.decided:
            taken = [task for literal, task in self.tasks.parts(k) if literal is None or solver.boolean_value(literal)]
            present[k] = bool(taken)
            for task in taken:
                start[k], length[k] = solver.value(task.start), task.ticks
        modes = around.modes.copy()
        for (s, i), options in self.variables.options.items():
            modes[s, i] = next(option.number for option in options if solver.boolean_value(option.literal))
        for (s, i), leaves in self.variables.leaves.items():
            stage = self.problem.stages[s]
            modes[s, i] = stage.choice_numbers[OFFLOAD] if solver.boolean_value(leaves) else 0
        inside = np.array([k for k in self.decided if present[k]], np.int64)
        if (start[inside] == around.start[inside]).all() and (present == around.present).all():
            return None
        inside = inside[np.argsort(start[inside], kind="stable")]
        after = np.flatnonzero(around.present & (self.frame.where == AFTER))
        # Behind all of the window, so that orders and waits derived from these times keep the order of what follows.
        start[after] += int((start + length)[inside].max(initial=self.window.end)) - self.window.end
        problem, devices = self.problem, []
        planned: dict[Op, tuple[int, int]] = {}
        for d, device in enumerate(around.streams):
            of_device = inside[self.numbering.device[inside] == d]
            lists = []
            for x, old in enumerate(device):
                where, of_stream = self.frame.where[old], of_device[self.numbering.stream[of_device] == x]
                numbers = np.concatenate([old[where == BEFORE], of_stream, old[where == AFTER]])
                times = zip(start[numbers].tolist(), (start + length)[numbers].tolist(), strict=True)
                slots = dict(zip([ops[k] for k in numbers.tolist()], times, strict=True))
                slots = self._whole(slots)
                lists.append(OpArray.of(list(slots)).numbered(self.problem.pass_names))
                planned.update(slots)
            devices.append(DeviceOrders(*lists))
        channels = [
            sorted((op for d, stream in lists for op in getattr(devices[d], stream)), key=planned.__getitem__)
            for lists in shared_channels(problem)
        ]
        chosen = modes if problem.has_modes else None
        waits = derive_waits(problem, devices, planned, modes=chosen)
        return Orders(devices, waits, [channel for channel in channels if channel], chosen)

    def _whole(self, slots: dict[Op, tuple[int, int]]) -> dict[Op, tuple[int, int]]:
        """Starts and ends of a stream's ops, those that are one op of orders put together."""
        result: dict[Op, tuple[int, int]] = {}
        for op, (start, end) in slots.items():
            kind = op.kind
            if kind == "W" and not self.problem.stages[op.stage].split_backward:
                continue
            if kind == "B" and op._replace(kind="CB") in slots:
                continue
            if kind == "CB":
                end = slots[op._replace(kind="B")][1]
            if kind in ("B", "CB") and not self.problem.stages[op.stage].split_backward:
                kind, end = f"{kind}W", slots[op._replace(kind="W")][1]
            result[op._replace(kind=kind)] = start, end
        return result


class Memory:
    """Adds the budgets of devices and host to the model of `tasks`."""

    def __init__(self, tasks: Tasks) -> None:
        self.tasks, self.frame = tasks, tasks.frame
        self.variables, self.model, self.problem = tasks.variables, tasks.model, tasks.problem
        self.numbering, self.around, self.where = tasks.numbering, tasks.around, tasks.frame.where

    def add_device_memory(self) -> None:
        """Activations and workspace stay within each device's budget."""
        for d, stages in enumerate(self.problem.stages_of):
            budget = self.problem.devices[d].memory_bytes
            touched = [(s, i) for s, i in self.tasks.touched if s in stages]
            passes = [(n, i) for n, at, i in self.tasks.touched_passes if at == d]
            if budget is not None and touched + passes:
                pieces = [piece for s, i in touched for piece in held(self.variables, s, i)]
                pieces += [piece for n, i in passes for piece in held_by_pass(self.variables, n, d, i)]
                level = self._level(d, set(touched)) + self._kept_by_passes(d, set(passes))
                self._add_budget(f"held{d}", pieces, budget - level)

    def _add_budget(self, name: str, pieces: Sequence[Held], budget: int) -> None:
        intervals = [self._interval(f"{name}.{n}", piece) for n, piece in enumerate(pieces)]
        held = [(interval, piece.size) for interval, piece in zip(intervals, pieces, strict=True) if interval]
        self.model.add_cumulative([interval for interval, _ in held], [size for _, size in held], budget)

    def _interval(self, name: str, piece: Held) -> cp_model.IntervalVar | None:
        """The part of a piece that lies behind the earliest start of an op of the window; None where there is none."""
        first, last = (self.tasks.outside(moment) for moment in (piece.first, piece.last))
        if first == AFTER or (last == BEFORE and self.tasks.fixed(piece.last) == self.frame.earliest):
            return None
        if first is None and last is None:
            if piece.first.task is piece.last.task and piece.presence is None:
                return piece.first.task.interval
            return self.variables.span(name, piece.first, piece.last, piece.presence, piece.least)
        begin = piece.first.expression if first is None else self.tasks.fixed(piece.first)
        end = piece.last.expression if last is None else self.tasks.fixed(piece.last)
        length = self.model.new_int_var(0, 2 * self.frame.far, f"{name}.length")
        self.variables.lengths.append((length, piece.first, piece.last, 0))
        if piece.presence is None:
            return self.model.new_interval_var(begin, length, end, name)
        return self.model.new_optional_interval_var(begin, length, end, piece.presence, name)

    def _level(self, device: int, touched: set[tuple[int, int]]) -> int:
        """Bytes that untouched microbatches hold throughout the window."""
        index, where, level = self.numbering.index, self.where, 0
        for s in self.problem.stages_of[device]:
            f, b, w = (where[[index[Op(kind, s, i)] for i in range(self.problem.units)]] for kind in "FBW")
            count = self.problem.slice_count
            for i in np.flatnonzero((f == BEFORE) & (w == AFTER)).tolist():
                if (s, i) in touched:
                    continue
                stage = self.problem.stage_of(s, i)
                last = i - i % count + count - 1  # whose backward takes gradients of keys and values for the others
                if isinstance(stage, UnitStage) and b[last] == BEFORE and b[i] == AFTER:
                    level += stage.gradients_freed_bytes
                if b[i] == BEFORE:
                    level += stage.backward_weight_bytes
                    continue
                offload, again = (index.get(Op(kind, s, i)) for kind in ("O", "C"))
                away = offload is not None and self._is_away_throughout(offload)
                made = again is not None and self.around.present[again] and where[again] == BEFORE
                mode = stage.choices[self.around.modes[s, i]]
                level += mode.kept_bytes + (mode.recomputed_bytes if made else 0) - (self._moved(s, i) if away else 0)
        return level

    def _kept_by_passes(self, device: int, touched: set[tuple[int, int]]) -> int:
        """Bytes that untouched ops of spread passes keep throughout the window."""
        graph, level = self.variables.graph, 0
        for n, one in enumerate(graph.passes):
            if one.freed_by is None or not one.kept_bytes[device].any():
                continue
            begun, freed = (
                self.where[[self.numbering.index[Op(name, device, i)] for i in range(self.problem.units)]]
                for name in (one.name, graph.passes[one.freed_by].name)
            )
            kept = np.flatnonzero((begun == BEFORE) & (freed == AFTER)).tolist()
            level += sum(int(one.kept_bytes[device, graph.unit_class[i]]) for i in kept if (n, i) not in touched)
        return level

    def add_host_memory(self) -> None:
        """Keep what is away within the host's budget, from O's start to R's end, all devices together."""
        limit, decided = self.problem.host_memory_bytes, {**self.variables.leaves, **self.variables.options}
        if limit is None:
            return
        away = [op for k, op in enumerate(self.numbering.ops) if op.kind == "O" and self._is_away_throughout(k)]
        level = sum(self._moved(*op[1:]) for op in away if op[1:] not in decided)
        on_host = [
            Held(self._copied(s, i, option), hold_start(option.tasks["O"]), hold_end(option.tasks["R"]), option.literal)
            for s, i in decided
            for option in self.variables.options_of(s, i)
            if "O" in option.tasks
        ]
        self._add_budget("host", on_host, limit - level)

    def _copied(self, s: int, i: int, option: OptionTasks) -> int:
        graph = self.variables.graph
        return int(graph.sizes_bytes["copied"][s, option.number, graph.unit_class[i]])

    def _is_away_throughout(self, offload: int) -> bool:
        reload = self.numbering.index[Op("R", *self.numbering.ops[offload][1:])]
        return bool(self.around.present[offload] and self.where[offload] == BEFORE and self.where[reload] == AFTER)

    def _moved(self, s: int, i: int) -> int:
        stage = self.problem.stage_of(s, i)
        offload = stage.choices[self.around.modes[s, i]].offload if stage.modes else stage.offload
        return offload.bytes if offload else 0


class Tasks:
    """Tasks in `variables` for every op of the activations that a window touches.

    `decided`: numbers of the ops whose start is open: those inside, and copies that may be added. The others stand
    where they are, those after the window `frame.far` later. `choices`: activations for which it is open whether they
    leave.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.numbering, self.around, self.problem = frame.numbering, frame.around, frame.problem
        self.variables = Variables(self.problem, self.numbering.grid, frame.far + 1)
        self.model = self.variables.model
        self.decided = set(frame.inside.tolist())
        self.choices: list[tuple[int, int]] = []
        near = [self.numbering.ops[k] for k in (*frame.inside.tolist(), *frame.running.tolist())]
        touched = {op[1:] for op in near if op.kind in KIND}
        count = self.problem.slice_count
        for s, i in list(touched):  # gradients of keys and values are held between the backwards of two slices
            if self.problem.stages[s].slice_gradient_bytes:
                touched.update((s, i - i % count + q) for q in range(count))
        self.touched = sorted(touched)
        for s, i in self.touched:
            if not self.problem.stages[s].split_backward:
                self.variables.fused[s, i] = self.model.new_constant(1)
            if not self.problem.stages[s].modes:
                self._add_leaves(s, i)
            for kind in "FBW" + ("OR" if (s, i) in self.variables.leaves else ""):
                self._add(Op(kind, s, i))
            if self.problem.stages[s].modes:
                self._add_options(s, i)
        self.touched_passes = self._add_passes(near)

    def _add(self, op: Op) -> None:
        """Add the task of an op: open inside the window, else where it stands."""
        frame, k = self.frame, self.numbering.index[op]
        if k in self.decided:
            presence = self.variables.leaves[op[1:]] if op.kind in COPIES else None
            self.variables.add_task(op, presence, self.earliest(k), self.latest_end(k))
            if presence is not None and self.earliest(k) < frame.heads[k]:
                rule = self.model.add(self.variables.tasks[op].start >= int(frame.heads[k]))
                rule.only_enforce_if(presence)
        else:
            later = frame.far if frame.where[k] == AFTER else 0
            self.variables.place(op, int(self.around.start[k]) + later)

    def _add_passes(self, near: Iterable[Op]) -> Sequence[tuple[int, int, int]]:
        """Add the spread passes that a window touches, with those that free what they keep: pass, device, unit."""
        passes, touched = self.variables.graph.passes, set[tuple[int, int, int]]()
        for op in (op for op in near if op.kind not in KIND):
            n = self.problem.pass_names.index(op.kind)
            freed = [m for m, one in enumerate(passes) if one.freed_by == n and op.stage in one.devices]
            touched.update((m, *op[1:]) for m in (n, *freed))
        for n, d, i in sorted(touched):
            for m in (n, passes[n].freed_by):
                if m is not None and d in passes[m].devices and Op(passes[m].name, d, i) not in self.variables.tasks:
                    self._add(Op(passes[m].name, d, i))
        return sorted(touched)

    def earliest(self, k: int) -> int:
        """The earliest start of the variable of an op of the window.

        A reload or recomputation that is absent still has one, which those of the units behind it come after. They may
        run before it could: of the slices of a microbatch the last is computed last, but comes back first. Nor do they
        wait for its gates.
        """
        absent = self.numbering.ops[k].kind in ("R", "C") and self.problem.slice_count > 1
        absent = absent or (k in self.numbering.gated and not self.around.present[k])
        return self.frame.window.begin if absent else int(self.frame.heads[k])

    def latest_end(self, k: int) -> int:
        """The latest end of an op of the window; a loose bound of one that is absent, or whose length differs.

        Absent it takes no time, and one before it that does may end when it would have to begin.
        """
        absent = self.numbering.ops[k].kind in ("O", "R", "C") and (
            not self.around.present[k] or self.problem.has_factors or self.problem.slice_count > 1
        )
        return 2 * self.frame.last_end if absent else self.frame.latest_end(k)

    def of(self, k: int) -> IntervalTask:
        """The task of an op by number; of one that depends on a mode, one of its tasks, which share their start."""
        return self.parts(k)[0][1]

    def parts(self, k: int) -> Sequence[tuple[cp_model.BoolVarT | None, IntervalTask]]:
        """The tasks that an op may be, each with its literal (None: it always runs)."""
        op = self.numbering.ops[k]
        if self.numbering.has_modes(op.kind, op.stage):
            return [
                (option.literal, option.tasks[op.kind])
                for option in self.variables.options[op[1:]]
                if op.kind in option.tasks
            ]
        return [(self.variables.leaves[op[1:]] if op.kind in COPIES else None, self.variables.tasks[op])]

    def _add_options(self, s: int, i: int) -> None:
        """Add the options of an activation, the one taken now first; others if all its ops may change places."""
        index, around, window = self.numbering.index, self.around, self.frame
        choice = int(around.modes[s, i])
        inside = around.present[index[Op("CB", s, i)]] if Op("CB", s, i) in index else False
        options = [Variant(choice, self.problem.stage_of(s, i).choices[choice], bool(inside))]
        own = [k for k in (index.get(Op(kind, s, i)) for kind in ("O", "R", "C", "CB")) if k is not None]
        movable = all(window.where[k] == INSIDE for k in own if around.present[k])
        if movable and self._is_free(s, i):
            others = unit_variants(self.problem, s, i)
            options += [option for option in others if option != options[0] and self._may_be(s, i, option, options[0])]
        starts: dict[str, cp_model.IntVar] = {}
        entries: list[OptionTasks] = []
        for n, option in enumerate(options):
            only = len(options) == 1
            literal = self.model.new_constant(1) if only else self.model.new_bool_var(f"way{s}.{i}.{n}")
            copies = ["O", "R"] if option.mode.offload else []
            kinds = [*copies, *(["C"] if option.ahead else ["CB"] if option.inside else [])]
            tasks = {kind: self._task_in_option(Op(kind, s, i), option, literal, starts, movable) for kind in kinds}
            entries.append(OptionTasks(option.choice, literal, tasks))
        if len(options) > 1:
            self.model.add_exactly_one(entry.literal for entry in entries)
        self.variables.options[s, i] = entries

    def _task_in_option(
        self, op: Op, option: Variant, literal: cp_model.IntVar, starts: dict[str, cp_model.IntVar], movable: bool
    ) -> IntervalTask:
        """The task of a copy or recomputation in an option; those of one kind share their start."""
        k, frame = self.numbering.index[op], self.frame
        ticks = self.numbering.ticks(op.kind, option.mode)
        if k not in self.decided and (self.around.present[k] or not movable):
            later = frame.far if frame.where[k] == AFTER else 0
            constant = self.model.new_constant(int(self.around.start[k]) + later)
            return IntervalTask(op, constant, ticks, self.model.new_fixed_size_interval_var(constant, ticks, f"{op}."))
        if k not in self.decided:
            self.decided.add(k)
            again = op.kind in ("C", "CB")
            frame.heads[k] = frame.recomputation_head(k) if again else frame.copy_head(k)
            frame.tails[:, k] = frame.recomputation_tails(k) if again else frame.copy_tails(k)
        if op.kind not in starts:
            head = self.earliest(k)
            starts[op.kind] = self.model.new_int_var(head, max(self.latest_end(k), head), str(op))
        start = starts[op.kind]
        if self.earliest(k) < frame.heads[k]:
            self.model.add(start >= int(frame.heads[k])).only_enforce_if(literal)
        interval = self.model.new_optional_fixed_size_interval_var(start, ticks, literal, f"{op}.{option.choice}")
        return IntervalTask(op, start, ticks, interval)

    def _may_be(self, s: int, i: int, option: Variant, now: Variant) -> bool:
        """True if an activation may be held in another option from this window on: all that differs lies inside it."""
        index, where, mode = self.numbering.index, self.frame.where, option.mode
        forward, backward = where[index[Op("F", s, i)]], where[index[Op("B", s, i)]]
        if forward == AFTER or backward == BEFORE or (option.inside and backward != INSIDE) or self._is_endless(mode):
            return False
        if forward == BEFORE:  # its memory is taken: it may only be less
            taken, new = (
                [w.mode.kept_bytes, w.mode.kept_bytes + w.mode.forward_workspace_bytes] for w in (now, option)
            )
            if new[0] > taken[0] or new[1] > taken[1]:
                return False
        kinds = ("O", "R") if mode.offload else ()
        return self.frame.keeps_order((*kinds, *(("C",) if option.ahead else ())), s, i)

    def _add_leaves(self, s: int, i: int) -> None:
        """Add the literal of an activation that leaves or may leave: a decision if both copies lie in the window."""
        if self.problem.stages[s].offload is None:
            return
        o, r, f, b = (self.numbering.index[Op(kind, s, i)] for kind in "ORFB")
        leaves = self.variables.leaves
        if self.around.present[o]:
            both_inside = self.frame.where[o] == INSIDE and self.frame.where[r] == INSIDE
            if both_inside and self._is_free(s, i):
                self._add_choice(s, i)
            else:
                leaves[s, i] = self.model.new_constant(1)
        elif (
            self._is_free(s, i)
            and not self._is_endless(
                self.problem.stage_of(s, i).choices[self.problem.stages[s].choice_numbers[OFFLOAD]]
            )
            and self.frame.where[f] < AFTER
            and self.frame.where[b] > BEFORE
            and self.frame.keeps_order("OR", s, i)
        ):
            self._add_choice(s, i)
            for k in (o, r):
                self.decided.add(k)
                self.frame.heads[k] = self.frame.copy_head(k)
                self.frame.tails[:, k] = self.frame.copy_tails(k)

    def _is_endless(self, mode: Mode) -> bool:
        """True if a copy of a mode takes longer than the whole schedule."""
        return any(self.numbering.ticks(kind, mode) > self.frame.last_end for kind in ("O", "R"))

    def _add_choice(self, s: int, i: int) -> None:
        self.variables.leaves[s, i] = self.model.new_bool_var(f"leaves{s}.{i}")
        self.choices.append((s, i))

    def _is_free(self, s: int, i: int) -> bool:
        """True if the activation's ops may change places."""
        return bool(self.frame.window.free[self.numbering.index[Op("F", s, i)]])

    def outside(self, moment: Moment) -> int | None:
        """Side of the window on which a fixed moment lies (BEFORE, AFTER); None where the model decides."""
        k = self.numbering.index[moment.task.op]
        return None if k in self.decided else int(self.frame.where[k])

    def fixed(self, moment: Moment) -> int:
        """The time of a moment that the model does not decide, no earlier than any that it does."""
        k = self.numbering.index[moment.task.op]
        at = int(self.around.end[k] if moment.is_end else self.around.start[k])
        return at + self.frame.far if self.frame.where[k] == AFTER else max(at, self.frame.earliest)
