"""Memory in a window: what its ops hold, beside what stays untouched throughout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ortools.sat.python import cp_model

from optpipe.orders import Op
from solver.exact.cp_sat.memory import Held, end, held, start
from solver.search.windows_frame import AFTER, BEFORE
from solver.search.windows_tasks import Tasks


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
            if budget is not None and touched:
                pieces = [piece for s, i in touched for piece in held(self.variables, s, i)]
                self._add_budget(f"held{d}", pieces, budget - self._level(d, set(touched)))

    def _add_budget(self, name: str, pieces: Sequence[Held], budget: int) -> None:
        intervals = [self._interval(f"{name}.{n}", piece) for n, piece in enumerate(pieces)]
        there = [(interval, piece.size) for interval, piece in zip(intervals, pieces, strict=True) if interval]
        self.model.add_cumulative([interval for interval, _ in there], [size for _, size in there], budget)

    def _interval(self, name: str, piece: Held) -> cp_model.IntervalVar | None:
        """The part of a piece that lies in the window or after it; None where there is none."""
        first, last = (self.tasks.outside(moment) for moment in (piece.first, piece.last))
        if first == AFTER or (last == BEFORE and self.tasks.fixed(piece.last) == self.frame.window.begin):
            return None
        if first is None and last is None:
            if piece.first.task is piece.last.task:
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
            stage = self.problem.stages[s]
            f, b, w = (where[[index[Op(kind, s, i)] for i in range(self.problem.microbatches)]] for kind in "FBW")
            for i in np.flatnonzero((f == BEFORE) & (w == AFTER)).tolist():
                if (s, i) not in touched:
                    level += (
                        stage.backward_weight_bytes if b[i] == BEFORE else stage.activation_bytes - self._away(s, i)
                    )
        return level

    def _away(self, s: int, i: int) -> int:
        """Bytes of an untouched activation that are on the host throughout the window."""
        offload = self.numbering.index.get(Op("O", s, i))
        return self._moved(s) if offload is not None and self._is_away_throughout(offload) else 0

    def add_host_memory(self) -> None:
        """What is away stays within the host's budget, from O's start to R's end, all devices together."""
        limit, leaves = self.problem.host_memory_bytes, self.variables.leaves
        if limit is None:
            return
        away = [op for k, op in enumerate(self.numbering.ops) if op.kind == "O" and self._is_away_throughout(k)]
        level = sum(self._moved(op.stage) for op in away if (op.stage, op.microbatch) not in leaves)
        task = self.variables.task
        journeys = [
            Held(self._moved(s), start(task("O", s, i)), end(task("R", s, i)), literal)
            for (s, i), literal in leaves.items()
        ]
        self._add_budget("host", journeys, limit - level)

    def _is_away_throughout(self, offload: int) -> bool:
        reload = self.numbering.index[Op("R", *self.numbering.ops[offload][1:])]
        there = self.around.present[offload] and self.where[offload] == BEFORE and self.where[reload] == AFTER
        return bool(there)

    def _moved(self, s: int) -> int:
        offload = self.problem.stages[s].offload
        return offload.bytes if offload else 0
