"""Orders <-> values of the columns. Binaries are what counts: times are made from them, exactly."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix

from optpipe.orders import Op, Orders
from optpipe.simulate import simulate
from solver.exact.milp.variables import Table, Variables
from solver.exact.milp.windows import TOLERANCE, Bools, Floats, Ints
from solver.exact.weight_order import in_weight_order
from solver.plan import orders_of_plan


def point_of_orders(variables: Variables, orders: Orders) -> Floats:
    """The columns of a known schedule: a start for HiGHS, and what a neighbourhood keeps."""
    values = np.zeros(variables.size)
    values[: variables.objective], leaves = _starts(variables, orders)
    simulated = simulate(variables.problem, orders).value_us
    values[variables.objective] = simulated / variables.unit_us
    moves = variables.leaves >= 0
    values[variables.leaves[moves]] = leaves[moves]
    _Facts(variables, values, leaves).write()
    return values


def _starts(variables: Variables, orders: Orders) -> tuple[Floats, Bools]:
    """Start of every op, and which ops there are; an absent transfer follows F, O and the microbatch before at once."""
    simulation = simulate(variables.problem, orders)
    start = np.zeros(len(variables.ops))
    there = np.zeros(len(variables.ops), bool)
    begin, length = float(simulation.start_us.min()), variables.windows.length
    starts: dict[Op, float] = {}
    for op, k in simulation.index.items():
        at = (float(simulation.start_us[k]) - begin) / variables.unit_us
        for part in (op,) if op.kind != "BW" else (Op("B", *op[1:]), Op("W", *op[1:])):
            if part in variables.index:
                starts[part] = at
                at += length[variables.index[part]]
    for op, at in in_weight_order(variables.problem, starts).items():
        start[variables.index[op]], there[variables.index[op]] = at, True
    for k, op in enumerate(variables.ops):
        if op.kind in "OR" and not there[k]:
            before = [variables.partner(k, "F" if op.kind == "O" else "O")] + [k - 1] * (op.microbatch > 0)
            start[k] = max(start[b] + length[b] * there[b] for b in before)
    return start, there


class _Facts:
    """What is true of the orders of a schedule with known times."""

    def __init__(self, variables: Variables, values: Floats, there: Bools) -> None:
        self.variables, self.values = variables, values
        self.start = values[: variables.objective]
        self.end = self.start + variables.windows.length * there
        self.there = there
        self.rank = np.empty(len(self.start), np.int64)
        self.rank[np.lexsort((self.end, self.start))] = np.arange(len(self.start))

    def write(self) -> None:
        variables, start, end = self.variables, self.start, self.end
        for table in (variables.order, variables.ahead):
            a, b = table.open_pairs()
            self._set(table, a, b, self.rank[a] < self.rank[b])
        x, r = variables.started.open_pairs()
        self._set(variables.started, x, r, start[x] <= start[r] + TOLERANCE)
        x, r = variables.ended.open_pairs()
        self._set(variables.ended, x, r, end[x] <= start[r] + TOLERANCE)
        o, x = variables.away.open_pairs()
        self._set(variables.away, o, x, self._away(o, x))
        o, q = variables.returned.open_pairs()
        reload = self._partners(o, "R")
        self._set(variables.returned, o, q, end[reload] <= start[q] + TOLERANCE)
        o, q = variables.counted.open_pairs()
        ahead, returned = self._get(variables.ahead, o, q), self._get(variables.returned, o, q)
        self._set(variables.counted, o, q, self.there[o] & (ahead > returned))

    def _away(self, o: Ints, x: Ints) -> Bools:
        """Offloaded before x; its reload comes after x, which counts there (`started`, or the order on the channel)."""
        variables = self.variables
        reload = self._partners(o, "R")
        counts = np.where(
            variables.windows.computes[x],
            self._get(variables.started, x, reload),
            self._get(variables.order, x, reload),
        )
        left = self.end[o] <= self.start[x] + TOLERANCE
        return np.asarray(self.there[o] & left & (self.start[x] <= self.start[reload] + TOLERANCE) & (counts > 0))

    def _partners(self, ops: Ints, kind: str) -> Ints:
        return np.array([self.variables.partner(k, kind) for k in ops], np.int64)

    def _set(self, table: Table, a: Ints, b: Ints, yes: Bools) -> None:
        self.values[table.column[a, b]] = yes

    def _get(self, table: Table, a: Ints, b: Ints) -> Floats:
        column = table.column[a, b]
        chosen: Floats = table.constant[a, b] + table.slope[a, b] * np.where(column >= 0, self.values[column], 0.0)
        return chosen


class Timing:
    """Makes exact times of the binaries of a solution: the earliest that keep every row between two starts.

    A solver's own times carry its tolerances, and with them a decision may seem to contradict its time.
    """

    def __init__(self, variables: Variables, matrix: csr_matrix, lower: Floats) -> None:
        self.variables = variables
        starts = matrix[:, : variables.objective]
        objective = matrix[:, variables.objective].toarray().ravel()
        rows = np.flatnonzero((np.diff(starts.indptr) == 2) & (objective == 0))
        pairs = starts[rows]
        first, second = pairs.indices[::2], pairs.indices[1::2]
        forward = pairs.data[1::2] > 0
        self.before, self.after = np.where(forward, first, second), np.where(forward, second, first)
        self.binaries = matrix[rows][:, variables.objective + 1 :]
        self.lower = lower[rows]

    def orders(self, values: Floats) -> Orders:
        """The orders that the binaries of `values` stand for."""
        variables = self.variables
        decided = np.round(values)
        gap = self.lower - self.binaries @ decided[variables.objective + 1 :]
        start = self._earliest(gap)
        end = start + variables.windows.length
        present = [k for k in range(len(start)) if variables.leaves[k] < 0 or decided[variables.leaves[k]]]
        planned = {variables.ops[k]: (float(start[k]), float(end[k])) for k in present}
        return orders_of_plan(variables.problem, planned, TOLERANCE)

    def _earliest(self, gap: Floats) -> Floats:
        start: Floats = np.array(self.variables.windows.earliest, np.float64)
        for _ in range(len(start) + 1):
            later = start.copy()
            np.maximum.at(later, self.after, start[self.before] + gap)
            if (later <= start + TOLERANCE / len(start)).all():
                break
            start = later
        return start
