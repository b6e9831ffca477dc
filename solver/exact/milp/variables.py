"""Variables of the mixed-integer program.

Columns: one start a op (an absent transfer is an op without length somewhere between F and B), the objective, then
binaries. Where the order of microbatches is free, a binary for each two that differ orders all their ops of one kind
and stage, and the beginning of each device is a column between the objective and the binaries. On stages with
activation modes each variant that is not kept has a binary of its own, and copies and a recomputation of its own, with
its number behind the kind (`O2`); a recomputation inside the backward makes B longer. Times are in `unit_us`, a power
of ten that puts the horizon between 1e3 and 1e4, where HiGHS's absolute tolerances are fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from math import floor, log10
from typing import NamedTuple

import numpy as np

from optpipe.ops import Bools, Floats, Ints, Op
from optpipe.problem import Problem
from optpipe.stage import Stage, UnitStage
from optpipe.task_graph import lower
from solver.bounds.device import fusing_may_help
from solver.exact.milp.time_windows import TOLERANCE, TimeWindows
from solver.exact.rules import microbatches_in_order
from solver.scale import has_options
from solver.variants import Variant, unit_variants, variants

LARGEST_SIZE = 10_000
"""Largest coefficient of a row on memory, in units of bytes."""


class Table:
    """A 0-1 value for each pair of ops (by index): ``constant + slope * column``, or a constant where it is fixed."""

    def __init__(self, size: int) -> None:
        self.column = np.full((size, size), -1, np.int64)
        self.slope = np.zeros((size, size))
        self.constant = np.zeros((size, size))

    def is_open(self, a: int | Ints, b: int | Ints) -> Bools:
        """True if the value is a decision."""
        result: Bools = self.column[a, b] >= 0
        return result

    def may_be(self, a: int | Ints, b: int | Ints, value: int) -> Bools:
        """True if it is a decision, or fixed to `value`."""
        result: Bools = self.is_open(a, b) | (self.constant[a, b] == value)
        return result

    def open_pairs(self) -> tuple[Ints, Ints]:
        """The pairs whose value is a column."""
        a, b = np.nonzero(self.slope > 0)
        return a, b

    @property
    def arrays(self) -> tuple[Ints, Floats, Floats]:
        """Columns, slopes and constants of all pairs."""
        return self.column, self.slope, self.constant

    def reverse(self, a: Ints, b: Ints) -> None:
        """Set the value of each reversed pair to one less that of the pair."""
        self.column[b, a], self.slope[b, a] = self.column[a, b], -self.slope[a, b]
        self.constant[b, a] = 1 - self.constant[a, b]


class OptionColumn(NamedTuple):
    """A variant of an activation beside kept, `number` among those of its stage, and its column.

    `saved_bytes` are not on the device from F, the op `forward`, to its `end`: its C, or B where it recomputes inside.
    `beside_bytes`: what F, C and B (by kind) take while they run beside what the activation would take if it were kept.
    """

    number: int
    variant: Variant
    column: int
    forward: int
    end: int
    saved_bytes: int
    beside_bytes: dict[str, int]


class Fused(NamedTuple):
    """The decision that `weight` follows `backward` at once, as one op.

    Then the backward takes `start_bytes` more at its start (or less), and the level at the start of `weight`, which is
    none of an op, counts `weight_bytes` too much.
    """

    column: int
    backward: int
    weight: int
    start_bytes: int
    weight_bytes: int


def fusing_stages(problem: Problem) -> frozenset[int]:
    """The stages on which backwards may be fused in the model: where that may help, on devices without copies."""
    return frozenset(
        s
        for s, stage in enumerate(problem.stages)
        if fusing_may_help(problem, s) and not has_options(problem, stage.device)
    )


def has_every_schedule(problem: Problem) -> bool:
    """True if the optimum of the model is that of the problem."""
    return all(s in fusing_stages(problem) for s in range(len(problem.stages)) if fusing_may_help(problem, s))


class Variables:
    """Columns for a problem; no op ends later than `horizon_us`, no value of interest exceeds `value_us`.

    `order[a, b]`: a ends before b starts, for compute ops of a device and transfers of a channel. `started[x, r]` and
    `ended[x, r]`: compute op x counts as started (ended) when reload r starts. `away[o, x]`: what offload o moved is
    not on the device when x starts. `ahead[o, q]`, `returned[o, q]`, `counted[o, q]`: when offload q starts, o counts
    as started, its reload has ended, its bytes are on the host.

    `before[i, j]`: microbatch i is j or runs before it, known where their order is given. Where it is free, `order` of
    two ops of one kind and stage has the columns of `before`. `begin`: of each device the column of its beginning, the
    start of its first op where that is known (-1 without stages). `alike`: microbatches are whole and have equal
    costs. `fused`: of every stage in `fusing` and every unit the decision that its W follows its B at once, as one op
    BW. `follows` and `leads`: masks of the ops whose neighbour in `ops` before them, or after them, is that of the same
    kind and stage that is known to run before them, or after them; W of `fusing` stages may overtake one another.

    `options`: of every stage and unit the variants that are decided on, by those columns (`leaves` has the column of
    a variant's ops). `gone[n, x]`: what `recomputing[n]` saves is not there when x starts; `beside[n, kind, r]`: its op
    of that kind runs when reload r starts. `longer`: for each B the columns and times of what recomputes inside it.
    """

    def __init__(self, problem: Problem, horizon_us: float, value_us: float, options: Options) -> None:
        self.problem = problem
        self.unit_us = 10.0 ** (floor(log10(horizon_us)) - 3) if horizon_us > 0 else 1.0
        self.horizon = horizon_us / self.unit_us
        self.ops: list[Op] = []
        groups = microbatches_in_order(problem)
        for s, stage in enumerate(problem.stages):
            # Without a budget an activation that leaves saves nothing.
            limited = problem.devices[stage.device].memory_bytes is not None
            kinds = list("FBWOR" if limited and stage.offload and stage.offload.bytes else "FBW")
            if limited and stage.modes:
                own = (kind + str(n) for n, option in enumerate(variants(stage)) for kind in _own(option))
                kinds = ["F", "B", "W", *own]
            self.ops += [
                Op(kind, s, i)
                for kind in kinds
                for group in groups
                for i in problem.units_in_order(kind[0], group).tolist()
            ]
        self.index = {op: k for k, op in enumerate(self.ops)}
        size = len(self.ops)
        self.microbatch = np.array([op.microbatch for op in self.ops]) // problem.slice_count
        self.alike = problem.has_equal_microbatches
        self.fusing = fusing_stages(problem)
        in_order = np.array([op.kind != "W" or op.stage not in self.fusing for op in self.ops])
        places = np.concatenate([np.arange(len(group) * problem.slice_count) for group in groups])
        self.follows = in_order & (np.resize(places, size) > 0)
        self.leads = in_order & np.append(np.resize(places, size)[1:] > 0, False)
        self.windows = TimeWindows(
            problem,
            self.ops,
            np.array([_duration_us(problem, op) for op in self.ops]) / self.unit_us,
            self.unit_us,
            self.horizon,
            min(value_us, horizon_us) / self.unit_us,
            fusing=self.fusing,
            fix=options.windows,
        )
        self.names: list[str] = [f"start_{_name(op)}" for op in self.ops] + ["objective"]
        self.objective = size
        self._add_microbatch_order(groups)
        self.leaves = np.full(size, -1, np.int64)
        self.order, self.started, self.ended, self.away = (Table(size) for _ in range(4))
        self.ahead, self.returned, self.counted = (Table(size) for _ in range(3))
        sizes = [_sizes_bytes(problem, op) for op in self.ops]
        self.take, self.free, self.moved = np.array(sizes, np.int64).T.copy()
        # All ops of a kind and stage alike, so that what is decided about one says something about its neighbours.
        self.rises, self.falls = (
            np.repeat((change > 0).reshape(-1, problem.units).any(axis=1), problem.units)
            for change in (self.take, self.free)
        )
        for k, op in enumerate(self.ops):
            if op.kind == "O":
                self.leaves[[k, self.partner(k, "R")]] = len(self.names)
                self.names.append(f"leaves_{op.stage}_{op.microbatch}")
        self.fused: dict[tuple[int, int], Fused] = {}
        for s, i in product(sorted(self.fusing), range(problem.units)):
            self._add_fused(s, i)
        self.options: dict[tuple[int, int], list[OptionColumn]] = {}
        for s, stage in enumerate(problem.stages):
            if stage.modes and problem.devices[stage.device].memory_bytes is not None:
                for i in range(problem.units):
                    self._add_options(s, i)
        self.recomputing = [
            option for options in self.options.values() for option in options if option.variant.mode.recomputes
        ]
        self.gone = np.full((len(self.recomputing), size), -1, np.int64)
        self.beside: dict[tuple[int, str, int], int] = {}
        self.longer = {
            self.index[Op("B", s, i)]: [
                (option.column, option.variant.mode.recompute_us / self.unit_us)
                for option in options
                if option.variant.inside
            ]
            for (s, i), options in self.options.items()
        }
        self.most_longer = np.zeros(size)
        for k, terms in self.longer.items():
            self.most_longer[k] = max((time for _, time in terms), default=0.0)
        self._add_orders()
        for d in range(len(problem.devices)):
            self._add_memory(d)
        self._add_host()

    def _add_microbatch_order(self, groups: Sequence[Sequence[int]]) -> None:
        """The order of microbatches, and where devices begin."""
        self.begin = np.array([firsts[0] if len(firsts) else -1 for firsts in self.windows.firsts], np.int64)
        self.before = Table(self.problem.microbatches)
        self.before.constant[:] = np.tri(self.problem.microbatches).T
        if len(groups) == 1:
            return
        devices = np.flatnonzero(self.begin >= 0)
        self.begin[devices] = np.arange(len(self.names), len(self.names) + len(devices))
        self.names += [f"begin_{d}" for d in devices]
        pairs = sorted(sorted(pair) for one, other in combinations(groups, 2) for pair in product(one, other))
        i, j = np.array(pairs, np.int64).T
        self.before.constant[i, j] = 0.0
        self._decide(self.before, i, j, [f"before_{a}_{b}" for a, b in pairs])
        self.before.reverse(i, j)

    def microbatch_order(self, values: Floats) -> list[int] | None:
        """The order of microbatches in the columns of a point, where it is free."""
        if not self.problem.has_free_order:
            return None
        column = self.before.column
        is_before = self.before.constant + self.before.slope * np.where(column >= 0, np.round(values[column]), 0.0)
        return [int(i) for i in np.argsort(is_before.sum(axis=0), kind="stable")]

    def _add_fused(self, s: int, i: int) -> None:
        stage = self.problem.stage_of(s, i)
        backward, weight = self.index[Op("B", s, i)], self.index[Op("W", s, i)]
        taken, _ = _gradients_bytes(stage)
        start, grown = stage.workspace_bytes.BW + taken, int(self.take[backward] - self.free[backward])
        more = start - int(self.take[backward])
        self.fused[s, i] = Fused(
            len(self.names), backward, weight, more, max(0, grown + int(self.take[weight]) - start)
        )
        self.names.append(f"fused_{s}_{i}")
        self.rises[backward] = True

    @property
    def size(self) -> int:
        """The number of columns."""
        return len(self.names)

    def of(self, kinds: Collection[str], device: int) -> Ints:
        """The ops of some kinds on a device, by index."""
        stages = self.problem.stages
        chosen = [k for k, op in enumerate(self.ops) if op.kind[0] in kinds and stages[op.stage].device == device]
        return np.array(chosen, np.int64)

    def partner(self, k: int, kind: str) -> int:
        """The op of another kind of the same stage and microbatch, and of the same variant."""
        own, s, i = self.ops[k]
        return self.index[Op(kind + own[1:] if kind in "ORC" else kind, s, i)]

    def partners(self, ops: Ints, kind: str) -> Ints:
        """The partner of each op."""
        return np.array([self.partner(k, kind) for k in ops], np.int64)

    def first_of(self, device: int) -> int:
        """The op that begins a device, the first F of its lowest stage; -1 where the order of microbatches is free."""
        return -1 if self.problem.has_free_order else int(self.windows.firsts[device][0])

    def last_of(self, device: int) -> list[int]:
        """The W one of which is the last op of a device: on each stage those that no other is known to follow."""
        weights = self.of("W", device)
        return [int(k) for k in weights if not self.leads[k]]

    def bytes_unit(self, device: int | None) -> float:
        """Bytes that count as 1 in the rows of a device (None: of the host).

        A common divisor where that leaves small numbers; else so many that HiGHS's tolerance is less than a byte for
        sizes up to 10 GB, and not so few that a row's numbers are far from those of the others.
        """
        ops = [k for k, op in enumerate(self.ops) if device in (None, self.problem.stages[op.stage].device)]
        options = [
            option
            for option in self.recomputing
            if device in (None, self.problem.stages[self.ops[option.forward].stage].device)
        ]
        more = [size for option in options for size in (option.saved_bytes, *option.beside_bytes.values())]
        more += [size for one in self.fused.values() for size in (one.start_bytes, one.weight_bytes)]
        sizes = np.abs(np.concatenate([self.take[ops], self.free[ops], self.moved[ops], more, [1]]).astype(np.int64))
        divisor, largest = int(np.gcd.reduce(sizes[:-1])) or 1, int(sizes.max())
        return float(divisor) if largest <= LARGEST_SIZE * divisor else largest / LARGEST_SIZE

    def overtaking(self) -> Iterator[tuple[int, int, int, int]]:
        """W of stages with fused backwards that keep their order unless one is fused: two of `fused` and their W.

        The microbatch of the first is that of the second or may be before it.
        """
        units, n = self.problem.units_in_order("W").tolist(), self.problem.slice_count
        pairs = [
            (i, j)
            for (at, i), (other, j) in permutations(enumerate(units), 2)
            if (at < other if i // n == j // n else self.before.may_be(i // n, j // n, 1))
        ]
        for s in self.fusing:
            for i, j in pairs if self.problem.stages[s].split_backward else ():
                first, second = self.fused[s, i], self.fused[s, j]
                if not self.windows.implies(first.weight, second.weight):
                    yield first.column, second.column, first.weight, second.weight

    def taking_turns(self) -> Iterator[tuple[int, int, int]]:
        """The last backwards of microbatches and the first of those that may run before or after: `fused`, W, and B."""
        n = self.problem.slice_count
        for s, (i, j) in product(self.fusing, np.argwhere(self.before.column >= 0).tolist()):
            fused = self.fused[s, i * n]
            yield fused.column, fused.weight, self.index[Op("B", s, j * n + n - 1)]

    def _open(self, table: Table, prefix: str, a: Ints, b: Ints) -> None:
        """Make the pairs of ops decisions: one new column each."""
        names = [f"{prefix}_{_name(self.ops[p])}_{_name(self.ops[q])}" for p, q in zip(a, b, strict=True)]
        self._decide(table, a, b, names)

    def _decide(self, table: Table, a: Ints, b: Ints, names: Sequence[str]) -> None:
        table.column[a, b] = np.arange(len(self.names), len(self.names) + len(names))
        table.slope[a, b] = 1.0
        self.names += names

    def _add_orders(self) -> None:
        """One binary for each pair whose order the windows leave open."""
        for d in range(len(self.problem.devices)):
            self._order_all(self.of("FBWC", d))
        for group, kinds in lower(self.problem).channels:
            self._order_all(np.concatenate([self.of(kinds, d) for d in group]))

    def _order_all(self, ops: Ints) -> None:
        a, b = ops[np.array(list(combinations(range(len(ops)), 2)), np.int64).reshape(-1, 2).T]
        before, after = self.windows.implies(a, b), self.windows.implies(b, a)
        self.order.constant[a[before], b[before]] = 1.0
        self.order.constant[b[after], a[after]] = 1.0
        a, b = a[~(before | after)], b[~(before | after)]
        turns = self._take_turns(a, b)
        self._open(self.order, "order", a[~turns], b[~turns])
        i, j = self.microbatch[a[turns]], self.microbatch[b[turns]]
        for decided, shared in zip(self.order.arrays, self.before.arrays, strict=True):
            decided[a[turns], b[turns]] = shared[i, j]
        self.order.reverse(a, b)

    def _take_turns(self, a: Ints, b: Ints) -> Bools:
        """Mask of the pairs of ops of one kind and stage that are ordered as their microbatches, by a decision."""
        kinds = np.array([op.kind[0] for op in self.ops])
        stages = np.array([op.stage for op in self.ops])
        overtakes = (kinds == "W") & np.isin(stages, list(self.fusing))
        alike = (kinds[a] == kinds[b]) & (stages[a] == stages[b]) & ~overtakes[a]
        turns: Bools = alike & self.before.is_open(self.microbatch[a], self.microbatch[b])
        return turns

    def _add_memory(self, device: int) -> None:
        """Terms of a device's level at each reload and at each op that takes memory."""
        windows, length = self.windows, self.windows.length
        reloads, compute = self.of("R", device), self.of("FBWC", device)
        takers, releasers = compute[self.rises[compute]], compute[self.falls[compute]]
        self._relate(self.started, "started", takers, reloads, np.zeros(len(takers)))
        self._relate(self.ended, "ended", releasers, reloads, windows.surely[releasers])
        offloads = self.of("O", device)
        o, x = (grid.ravel() for grid in np.meshgrid(offloads, np.append(takers, reloads), indexing="ij"))
        forward, reload, backward = (self.partners(o, kind) for kind in "FRB")
        # No decision where there is no time to offload before x, or none to reload after it.
        can_leave = windows.widest[x, forward] >= length[forward] + length[o] - TOLERANCE
        can_return = windows.widest[backward, x] >= length[reload] - TOLERANCE
        possible = can_leave & can_return & (x != reload) & ~windows.implies(reload, x) & ~windows.implies(x, o)
        self._open(self.away, "away", o[possible], x[possible])
        for n, option in enumerate(self.recomputing):
            if self.problem.stages[self.ops[option.forward].stage].device != device:
                continue
            for x_ in np.append(takers, reloads).tolist():
                known = windows.implies(x_, option.forward) or windows.implies(option.end, x_)
                if not known and x_ not in (option.forward, option.end):
                    self.gone[n, x_] = len(self.names)
                    self.names.append(f"gone_{self._option_name(option)}_{_name(self.ops[x_])}")
            for kind, beside in option.beside_bytes.items():
                if beside == 0:
                    continue
                for r in reloads.tolist():
                    k = self.running(option, kind)
                    if not (self.started.may_be(k, r, 1) and self.ended.may_be(k, r, 0)):
                        continue
                    self.beside[n, kind, r] = len(self.names)
                    self.names.append(f"beside_{kind}_{self._option_name(option)}_{_name(self.ops[r])}")

    def running(self, option: OptionColumn, kind: str) -> int:
        """The op of a kind (F, C, B) of an activation in an option."""
        return option.forward if kind == "F" else option.end

    def _option_name(self, option: OptionColumn) -> str:
        return f"{self.ops[option.forward].stage}_{self.ops[option.forward].microbatch}_{option.number}"

    def _add_options(self, s: int, i: int) -> None:
        """One column for each variant but kept."""
        stage = self.problem.stage_of(s, i)
        work = stage.workspace_bytes
        forward, backward = self.index[Op("F", s, i)], self.index[Op("B", s, i)]
        options = self.options[s, i] = []
        for n, variant in enumerate(unit_variants(self.problem, s, i)):
            if n == 0:
                continue
            mode, end, column = variant.mode, backward, len(self.names)
            self.names.append(f"way_{s}_{i}_{n}")
            beside = {}
            for kind in _own(variant):
                self.leaves[self.index[Op(f"{kind}{n}", s, i)]] = column
            if mode.recomputes:
                beside["F"] = mode.forward_workspace_bytes
                if variant.ahead:
                    end = self.index[Op(f"C{n}", s, i)]
                    beside["C"] = mode.workspace_bytes
                else:
                    # Growth counts from the start of B, as for `take`.
                    taken, freed = _gradients_bytes(stage)
                    inside = max(
                        variant.backward_bytes - mode.kept_bytes + work.B + taken,
                        stage.backward_weight_bytes - mode.kept_bytes + taken - freed,
                    )
                    beside["B"] = inside - int(self.take[backward])
            options.append(OptionColumn(n, variant, column, forward, end, mode.recomputed_bytes, beside))
        self.falls[[forward, backward]] = True
        for option in options:
            self.rises[option.end] = self.falls[option.end] = True

    def _relate(self, table: Table, prefix: str, ops: Ints, reloads: Ints, gap: Floats) -> None:
        """True if op x comes before reload r: known where a precedence or the windows say so."""
        windows = self.windows
        x, r = (grid.ravel() for grid in np.meshgrid(ops, reloads, indexing="ij"))
        before = windows.implies(x, r)
        table.constant[x[before], r[before]] = 1.0
        late = windows.widest[r, x] < np.repeat(gap, len(reloads)) - TOLERANCE
        undecided = ~(before | windows.implies(r, x) | late)
        self._open(table, prefix, x[undecided], r[undecided])

    def _add_host(self) -> None:
        offloads = np.flatnonzero(np.array([op.kind[0] == "O" for op in self.ops]))
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
        self.ahead.reverse(a, q)

    def bounds(self) -> tuple[Floats, Floats]:
        """Lower and upper bounds of all columns."""
        lower, upper = np.zeros(self.size), np.ones(self.size)
        starts = slice(0, self.objective)
        lower[starts], upper[starts] = self.windows.earliest, self.windows.latest
        upper[self.objective] = self.windows.value
        if self.problem.has_free_order:
            for d, firsts in enumerate(self.windows.firsts):
                if len(firsts):
                    lower[self.begin[d]] = self.windows.earliest[firsts].min()
                    upper[self.begin[d]] = self.windows.latest[firsts].min()
            a, b = np.nonzero(self.windows.distance > -np.inf)
            turns = self._take_turns(a, b)
            i, j = self.microbatch[a[turns]], self.microbatch[b[turns]]
            column, slope = self.before.column[i, j], self.before.slope[i, j]
            lower[column[slope > 0]], upper[column[slope < 0]] = 1.0, 0.0
        for (s, _), one in self.fused.items():
            lower[one.column] = not self.problem.stages[s].split_backward
        return lower, upper

    def is_binary(self) -> Bools:
        """Mask of the binary columns; `counted` follows from others and need not be."""
        binary: Bools = np.arange(self.size) > max(self.objective, *self.begin)
        binary[self.counted.column[self.counted.column >= 0]] = False
        binary[self.gone[self.gone >= 0]] = False
        binary[list(self.beside.values())] = False
        return binary


def _name(op: Op) -> str:
    """The name of an op in columns and rows: that of a variant's ops ends with the variant's number."""
    return "_".join([f"{op.kind[0]}{op.stage}", str(op.microbatch), *filter(None, [op.kind[1:]])])


def _own(variant: Variant) -> str:
    """Kinds of the ops that a variant has beside F, B and W."""
    return "OR" * (variant.mode.offload is not None) + "C" * variant.ahead


def _sizes_bytes(problem: Problem, op: Op) -> tuple[int, int, int]:
    """Bytes that a compute op takes at its start and frees at its end, and that a transfer moves.

    A B that holds more after it than before counts from its start: no wait could keep it from ending before another op
    has freed memory.
    """
    if op.kind[0] == "C":
        return 0, 0, 0  # in `OptionColumn.beside_bytes`, since the activation may be held in another option
    if op.kind[0] in "OR":
        return 0, 0, _variant(problem, op).moved_bytes
    stage = problem.stage_of(op.stage, op.microbatch)
    held, kept, work = stage.activation_bytes, stage.backward_weight_bytes, stage.workspace_bytes
    taken, freed = _gradients_bytes(stage)
    grown = kept - held + taken - freed  # by B
    take = {"F": held + work.F, "B": max(grown, work.B + taken), "W": work.W}[op.kind]
    free = {"F": work.F, "B": take - grown, "W": kept + work.W}[op.kind]
    return take, free, 0


def _gradients_bytes(stage: Stage) -> tuple[int, int]:
    """Gradients of keys and values that the backward of a unit takes at its start, and frees at its end."""
    return (stage.gradients_taken_bytes, stage.gradients_freed_bytes) if isinstance(stage, UnitStage) else (0, 0)


def _variant(problem: Problem, op: Op) -> Variant:
    """The variant whose op this is, by its number; of stages without modes the one that leaves."""
    return unit_variants(problem, op.stage, op.microbatch)[int(op.kind[1:] or 1)]


def _duration_us(problem: Problem, op: Op) -> float:
    if op.kind in "FBW":
        return problem.stage_of(op.stage, op.microbatch).duration_us(op.kind)
    mode = _variant(problem, op).mode
    if op.kind[0] == "C":
        return mode.recompute_us
    assert mode.offload is not None
    return mode.offload.offload_us if op.kind[0] == "O" else mode.offload.reload_us


@dataclass(frozen=True)
class Options:
    """Accelerations that can be switched off, to measure what they give.

    `windows`: orders that time windows and budgets imply are fixed, and big-M are the least that the windows allow.
    `chains`: order binaries agree along microbatches. `workloads`: an op starts after all work that is ordered before
    it, and ends before all that is ordered after it. `triangles`: the orders of any three ops form no cycle (OptPipe's
    triangle cuts), for up to `triangle_microbatches`. `work`: least work of a device before and after an op, as cuts.
    `weight_order`: W of like stages run in the order of their B (a symmetry). `bound`: the known lower bound is the
    objective's. `warm_start`: the search begins with the best schedule known. `rebuild_gain`: the relative gain over
    the schedule that the model was built for, from which on it is built again with narrower windows.

    Their gain depends on the problem (`docs/benchmarks.md`): triangles and chains cost more than they give on some
    linear ones, and decide whether a V is proved.
    """

    windows: bool = True
    chains: bool = True
    workloads: bool = True
    triangles: bool = True
    triangle_microbatches: int = 12
    work: bool = True
    weight_order: bool = True
    bound: bool = True
    warm_start: bool = True
    rebuild_gain: float = 0.02


DEFAULT = Options()
