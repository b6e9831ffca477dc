"""The decisions of the mixed-integer program: starts, orders, and which activations leave to the host.

Columns: one start a op (an absent transfer is an op without length somewhere between F and B), the objective, then
binaries. Times are in `unit_us`, a power of ten that puts the horizon between 1e3 and 1e4, where HiGHS's absolute
tolerances are fit.
"""

from __future__ import annotations

from itertools import combinations
from math import floor, log10

import numpy as np

from optpipe.orders import Op
from optpipe.problem import Problem, Stage
from solver.exact.milp.options import Options
from solver.exact.milp.windows import TOLERANCE, Bools, Floats, Ints, Windows

LARGEST_SIZE = 10_000
"""The largest number of bytes units in a row on memory."""


class Table:
    """A yes-or-no for each pair of ops (by index): ``constant + slope * column``, without column where it is known."""

    def __init__(self, size: int) -> None:
        self.column = np.full((size, size), -1, np.int64)
        self.slope = np.zeros((size, size))
        self.constant = np.zeros((size, size))

    def is_open(self, a: int | Ints, b: int | Ints) -> Bools:
        """Whether it is a decision."""
        result: Bools = self.column[a, b] >= 0
        return result

    def may_be(self, a: int | Ints, b: int | Ints, value: int) -> Bools:
        """Whether it is a decision, or known to be `value`."""
        result: Bools = self.is_open(a, b) | (self.constant[a, b] == value)
        return result

    def open_pairs(self) -> tuple[Ints, Ints]:
        """The pairs whose value is their own column."""
        a, b = np.nonzero(self.slope > 0)
        return a, b


class Variables:
    """Columns for a problem; no op ends later than `horizon_us`, no value of interest exceeds `value_us`.

    `order[a, b]`: a ends before b starts, for compute ops of a device and transfers of a channel. `started[x, r]` and
    `ended[x, r]`: compute op x counts as started (ended) when reload r starts. `away[o, x]`: what offload o moved is
    not on the device when x starts. `ahead[o, q]`, `returned[o, q]`, `counted[o, q]`: when offload q starts, o counts
    as started, its reload has ended, its bytes are on the host.
    """

    def __init__(self, problem: Problem, horizon_us: float, value_us: float, options: Options) -> None:
        self.problem = problem
        self.unit_us = 10.0 ** (floor(log10(horizon_us)) - 3) if horizon_us > 0 else 1.0
        self.horizon = horizon_us / self.unit_us
        self.ops = [op for s in range(len(problem.stages)) for op in _ops_of_stage(problem, s)]
        self.index = {op: k for k, op in enumerate(self.ops)}
        size = len(self.ops)
        self.windows = Windows(
            problem, self.ops, self.unit_us, self.horizon, min(value_us, horizon_us) / self.unit_us, options.windows
        )
        self.names: list[str] = [f"start_{_name(op)}" for op in self.ops] + ["objective"]
        self.objective = size
        self.leaves = np.full(size, -1, np.int64)
        self.order, self.started, self.ended, self.away = (Table(size) for _ in range(4))
        self.ahead, self.returned, self.counted = (Table(size) for _ in range(3))
        self.take, self.free, self.moved = self._effects()
        self._add_leaves()
        self._add_orders()
        for d in range(len(problem.devices)):
            self._add_memory(d)
        self._add_host()

    @property
    def size(self) -> int:
        """The number of columns."""
        return len(self.names)

    def of(self, kinds: str, device: int) -> Ints:
        """The ops of some kinds on a device, by index."""
        mine = [
            k for k, op in enumerate(self.ops) if op.kind in kinds and self.problem.stages[op.stage].device == device
        ]
        return np.array(mine, np.int64)

    def partner(self, k: int, kind: str) -> int:
        """The op of another kind of the same stage and microbatch."""
        return self.index[Op(kind, self.ops[k].stage, self.ops[k].microbatch)]

    def first_of(self, device: int) -> int:
        """The op that begins a device: the first F of its lowest stage."""
        return self.index[Op("F", self.problem.stages_of[device][0], 0)]

    def _effects(self) -> tuple[Ints, Ints, Ints]:
        """Bytes that each compute op takes at its start and frees at its end, and that each transfer moves.

        A B that holds more after it than before counts from its start: no wait could keep it from ending before
        another op has freed memory.
        """
        table = np.array([_effect(self.problem.stages[op.stage], op.kind) for op in self.ops], np.int64)
        return table[:, 0], table[:, 1], table[:, 2]

    def bytes_unit(self, device: int | None) -> float:
        """Bytes that count as 1 in the rows of a device (None: of the host).

        A common divisor where that leaves small numbers; else so many that HiGHS's tolerance is less than a byte for
        sizes up to 10 GB, and not so few that a row's numbers are far from those of the others.
        """
        here = [k for k, op in enumerate(self.ops) if device in (None, self.problem.stages[op.stage].device)]
        sizes = np.concatenate([self.take[here], self.free[here], self.moved[here], [1]])
        divisor, largest = int(np.gcd.reduce(sizes[:-1])) or 1, int(sizes.max())
        return float(divisor) if largest <= LARGEST_SIZE * divisor else largest / LARGEST_SIZE

    def _columns(self, prefix: str, a: Ints, b: Ints) -> Ints:
        """New columns, one a pair."""
        first = len(self.names)
        self.names += [f"{prefix}_{_name(self.ops[p])}_{_name(self.ops[q])}" for p, q in zip(a, b, strict=True)]
        return np.arange(first, len(self.names))

    def _open(self, table: Table, prefix: str, a: Ints, b: Ints) -> None:
        table.column[a, b] = self._columns(prefix, a, b)
        table.slope[a, b] = 1.0

    def _add_leaves(self) -> None:
        for k, op in enumerate(self.ops):
            if op.kind == "O":
                column = len(self.names)
                self.names.append(f"leaves_{op.stage}_{op.microbatch}")
                self.leaves[[k, self.partner(k, "R")]] = column

    def _add_orders(self) -> None:
        """One binary for each pair whose order the windows leave open."""
        for d in range(len(self.problem.devices)):
            self._order_all(self.of("FBW", d))
        for group in self.problem.channel_groups:
            for kinds in ("O", "R") if self.problem.copy_channels.duplex else ("OR",):
                self._order_all(np.concatenate([self.of(kinds, d) for d in group]))

    def _order_all(self, ops: Ints) -> None:
        a, b = ops[np.array(list(combinations(range(len(ops)), 2)), np.int64).reshape(-1, 2).T]
        before, after = self.windows.implies(a, b), self.windows.implies(b, a)
        self.order.constant[a[before], b[before]] = 1.0
        self.order.constant[b[after], a[after]] = 1.0
        a, b = a[~(before | after)], b[~(before | after)]
        self._open(self.order, "order", a, b)
        self.order.column[b, a] = self.order.column[a, b]
        self.order.slope[b, a] = -1.0
        self.order.constant[b, a] = 1.0

    def _add_memory(self, device: int) -> None:
        """What the level of a device is made of at each reload and at each op that takes memory."""
        reloads, compute = self.of("R", device), self.of("FBW", device)
        takers, releasers = compute[self.take[compute] > 0], compute[self.free[compute] > 0]
        self._relate(self.started, "started", takers, reloads, np.zeros(len(takers)))
        self._relate(self.ended, "ended", releasers, reloads, self.windows.length[releasers])
        offloads = self.of("O", device)
        a, x = (grid.ravel() for grid in np.meshgrid(offloads, np.append(takers, reloads), indexing="ij"))
        possible = self._may_be_away(a, x)
        self._open(self.away, "away", a[possible], x[possible])

    def _relate(self, table: Table, prefix: str, ops: Ints, reloads: Ints, gap: Floats) -> None:
        """Whether op x comes before reload r: known where a precedence or the windows say so."""
        windows = self.windows
        x, r = (grid.ravel() for grid in np.meshgrid(ops, reloads, indexing="ij"))
        before = windows.implies(x, r)
        table.constant[x[before], r[before]] = 1.0
        late = windows.widest[r, x] < np.repeat(gap, len(reloads)) - TOLERANCE
        undecided = ~(before | windows.implies(r, x) | late)
        self._open(table, prefix, x[undecided], r[undecided])

    def _may_be_away(self, offload: Ints, x: Ints) -> Bools:
        """Whether there is time to offload before x and to reload after it."""
        windows, length = self.windows, self.windows.length
        forward, reload, backward = (np.array([self.partner(k, kind) for k in offload], np.int64) for kind in "FRB")
        there = windows.widest[x, forward] >= length[forward] + length[offload] - TOLERANCE
        back = windows.widest[backward, x] >= length[reload] - TOLERANCE
        result: Bools = there & back & (x != reload) & ~windows.implies(reload, x) & ~windows.implies(x, offload)
        return result

    def _add_host(self) -> None:
        offloads = np.flatnonzero(np.array([op.kind == "O" for op in self.ops]))
        if self.problem.host_memory_bytes is None or not len(offloads):
            return
        windows = self.windows
        a, q = (grid.ravel() for grid in np.meshgrid(offloads, offloads, indexing="ij"))
        possible = (a != q) & ~windows.implies(q, a)
        self.ahead.constant[a[possible], q[possible]] = 1.0
        self._open(self.counted, "counted", a[possible], q[possible])
        self._open(self.returned, "returned", a[possible], q[possible])
        undecided = possible & ~windows.implies(a, q) & (a < q)
        a, q = a[undecided], q[undecided]
        self._open(self.ahead, "ahead", a, q)
        self.ahead.constant[a, q] = 0.0
        self.ahead.column[q, a], self.ahead.slope[q, a] = self.ahead.column[a, q], -1.0

    def bounds(self) -> tuple[Floats, Floats]:
        """Lower and upper bounds of all columns."""
        lower, upper = np.zeros(self.size), np.ones(self.size)
        starts = slice(0, self.objective)
        lower[starts], upper[starts] = self.windows.earliest, self.windows.latest
        upper[self.objective] = self.windows.value
        return lower, upper

    def is_binary(self) -> Bools:
        """Which columns are binary; `counted` follows from others and need not be."""
        binary = np.arange(self.size) > self.objective
        binary[self.counted.column[self.counted.column >= 0]] = False
        return binary


def _ops_of_stage(problem: Problem, s: int) -> list[Op]:
    """F, B, W of each microbatch, and O, R where leaving can help: where the device has a budget."""
    stage = problem.stages[s]
    limited = problem.devices[stage.device].memory_bytes is not None
    kinds = "FBWOR" if limited and stage.offload and stage.offload.bytes else "FBW"
    return [Op(kind, s, i) for kind in kinds for i in range(problem.microbatches)]


def _name(op: Op) -> str:
    return f"{op.kind}{op.stage}_{op.microbatch}"


def _effect(stage: Stage, kind: str) -> tuple[int, int, int]:
    held, kept, work = stage.activation_bytes, stage.backward_weight_bytes, stage.workspace_bytes
    if kind in "OR":
        assert stage.offload is not None
        return 0, 0, stage.offload.bytes
    take = {"F": held + work.F, "B": max(kept - held, work.B), "W": work.W}[kind]
    free = {"F": work.F, "B": take - kept + held, "W": kept + work.W}[kind]
    return take, free, 0
