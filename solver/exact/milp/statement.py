"""The model in words: the readable definition that the arrays must equal (`tests/solver/exact/milp/test_statement.py`).

One rule at a time in PuLP, in the terms of OptPipe (section 4) and Zero Bubble (appendix G). It serves to be read, and
`optpipe export` writes it as LP or MPS for other solvers; it takes ten times as long to build as the arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, permutations
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pulp

from optpipe.problem import Problem
from solver.exact.milp.variables import DEFAULT, Options, Table, Variables
from solver.exact.rules import least_work_around, like_pairs
from solver.scale import horizon_us
from solver.solution import Solution

Expression = Any
"""A number, a pulp variable, or a sum of them."""


def state(
    problem: Problem, horizon_us: float, bound_us: float, value_us: float = float("inf"), options: Options = DEFAULT
) -> pulp.LpProblem:
    """The whole model: the same columns by name as `solver.exact.milp.model.build_program`, and the same rows."""
    return _Statement(Variables(problem, horizon_us, value_us, options), bound_us, options).program


@dataclass(frozen=True)
class Statement:
    """The whole model of a problem, as other solvers read it: its objective is in us, its times in `time_unit_us`."""

    program: pulp.LpProblem
    time_unit_us: float

    @property
    def rows(self) -> int:
        """The number of constraints."""
        return len(self.program.constraints())

    @property
    def columns(self) -> int:
        """The number of variables."""
        return len(self.program.variables())

    @property
    def integer_columns(self) -> int:
        """The number of variables that are 0 or 1."""
        return sum(column.cat == pulp.LpInteger for column in self.program.variables())

    def to_text(self, form: Literal["lp", "mps"]) -> str:
        """Write the model in the LP format of CPLEX, or as free MPS."""
        with TemporaryDirectory() as folder:  # PuLP writes to files alone
            path = Path(folder) / "model"
            if form == "lp":
                self.program.writeLP(str(path))
            else:
                self.program.writeMPS(str(path))
            return path.read_text()


def state_in_us(problem: Problem, start: Solution) -> Statement:
    """State the model with what is known before a search; schedules with a value above that may be left out."""
    variables = Variables(problem, horizon_us(problem, start.value_us), start.value_us, DEFAULT)
    stated = _Statement(variables, start.bound_us, DEFAULT)
    stated.program.setObjective(variables.unit_us * stated.value)
    return Statement(stated.program, variables.unit_us)


class _Statement:
    def __init__(self, variables: Variables, bound_us: float, options: Options) -> None:
        self.variables, self.windows = variables, variables.windows
        self.problem, self.options = variables.problem, options
        self.ops = range(len(variables.ops))
        self.length = self.windows.length.tolist()
        self.surely = self.windows.surely.tolist()
        self.program = pulp.LpProblem("schedule", pulp.LpMinimize)
        self._op_names = [name.removeprefix("start_") for name in variables.names[: variables.objective]]
        self._rows: Counter[str] = Counter()
        self.columns = self._columns(bound_us)
        self.start = self.columns[: variables.objective]
        self.value = self.columns[variables.objective]
        self._state_rules()
        self._state_cuts()

    def _columns(self, bound_us: float) -> list[pulp.LpVariable]:
        variables = self.variables
        lower, upper = variables.bounds()
        if self.options.bound:
            lower[variables.objective] = min(bound_us / variables.unit_us, upper[variables.objective])
        kinds = ["Integer" if binary else "Continuous" for binary in variables.is_binary()]
        return [
            self.program.add_variable(name, float(low), float(high), kind)
            for name, low, high, kind in zip(variables.names, lower, upper, kinds, strict=True)
        ]

    def _state_rules(self) -> None:
        self.program.setObjective(self.value)
        self._precedences()
        self._begin()
        self._ways()
        self._fused_backwards()
        self._one_op_at_a_time()
        self._channels()
        self._reloads()
        self._away()
        self._gone()
        for d, device in enumerate(self.problem.devices):
            if device.memory_bytes is not None:
                self._device_memory(d, device.memory_bytes)
        if self.problem.host_memory_bytes is not None:
            self._host_memory(self.problem.host_memory_bytes)
        for d, stages in enumerate(self.problem.stages_of):
            if stages:
                self._objective(d)

    def _state_cuts(self) -> None:
        if self.options.chains:
            self._chains()
        for d, stages in enumerate(self.problem.stages_of):
            if self.options.workloads and stages:
                self._work_before(d)
            if self.options.triangles and self.problem.units <= self.options.triangle_microbatches:
                self._triangles(d)
        if self.options.work and self.variables.alike:
            self._work_that_memory_holds_back()
        if self.options.weight_order:
            self._weight_order()

    def _is(self, table: Table, a: int, b: int) -> Expression:
        """A yes-or-no of the model: 0, 1, a binary or its opposite."""
        column = int(table.column[a, b])
        if column < 0:
            return float(table.constant[a, b])
        return self.columns[column] if table.slope[a, b] > 0 else 1 - self.columns[column]

    def _known(self, table: Table, a: int, b: int) -> bool:
        return bool(table.column[a, b] < 0)

    def _pairs(self, table: Table) -> Iterator[tuple[int, int]]:
        """The pairs that the model decides."""
        return ((a, b) for a in self.ops for b in self.ops if table.column[a, b] >= 0)

    def _leaves(self, op: int) -> Expression:
        return self.columns[int(self.variables.leaves[op])]

    def _latest_lead(self, a: int, b: int) -> float:
        """The most by which a can start later than b."""
        return float(self.windows.widest[a, b])

    def _partner(self, op: int, kind: str) -> int:
        return self.variables.partner(op, kind)

    def _moves(self, op: int) -> bool:
        return self.variables.ops[op].kind[0] in "OR"

    def _own_length(self, op: int) -> Expression:
        """The part of an op's length that is decided: all of one that may be absent, a recomputation inside B."""
        terms = [time * self.columns[column] for column, time in self.variables.longer.get(op, ())]
        if self.variables.leaves[op] >= 0:
            terms.append(self.length[op] * self._leaves(op))
        return pulp.lpSum(terms)

    def _kinds(self, kinds: str, device: int) -> list[int]:
        return [int(k) for k in self.variables.of(kinds, device)]

    def _add(self, rule: Any, family: str, *ops: int) -> None:
        """Add a row, named by its family and ops such as `memory_F0_1`; a second one of that name is numbered."""
        name = "_".join([family, *(self._op_names[op] for op in ops)])
        self._rows[name] += 1
        self.program.addConstraint(rule, name if self._rows[name] == 1 else f"{name}_{self._rows[name]}")

    def _precedences(self) -> None:
        for before, after, delay in self.windows.edges:
            took = self.surely[before] + self._own_length(before)
            self._add(self.start[after] - self.start[before] - took >= delay, "precedence", before, after)

    def _begin(self) -> None:
        if self.problem.has_free_order:
            for d, firsts in enumerate(self.windows.firsts):
                for first in firsts.tolist():
                    self._add(self.start[first] >= self.columns[self.variables.begin[d]], "begin", first)

    def _ways(self) -> None:
        for ways in self.variables.ways.values():
            self._add(pulp.lpSum(self.columns[way.column] for way in ways) <= 1, "one_way", ways[0].forward)
        for way in self.variables.recomputing:
            if way.variant.ahead and way.variant.mode.offload:
                self._if_there(self._partner(way.end, "R"), way.end, "reloaded_before")
        for before, after in self.windows.if_there:
            self._if_there(before, after, "before_if_there")

    def _fused_backwards(self) -> None:
        variables = self.variables
        for one in variables.fused.values():
            fused, b, w = self.columns[one.column], one.backward, one.weight
            big = max(0.0, self._latest_lead(w, b) - self.length[b])
            self._add(self.start[w] - self.start[b] <= self.length[b] + big * (1 - fused), "fused_at_once", b, w)
            for before, after, delay in self.windows.edges:
                if before == b and variables.ops[after].kind == "B":
                    took = self.length[b] + self.length[w] * fused
                    self._add(self.start[after] - self.start[b] - took >= delay, "after_fused", b, after)
        for first, second, v, w in variables.overtaking():
            fused = self.columns[first] + self.columns[second]
            i, j = variables.microbatch[[v, w]].tolist()
            ordered = self._is(variables.order, v, w) + fused
            self._add(ordered >= self._is(variables.before, i, j), "weights_in_order", v, w)
        for column, w, b in variables.taking_turns():
            i, j = variables.microbatch[[w, b]].tolist()
            both = self.columns[column] + self._is(variables.before, i, j)
            self._add(self._is(variables.order, w, b) >= both - 1, "after_fused", w, b)

    def _if_there(self, before: int, after: int, family: str) -> None:
        """Make `after` start when `before` has ended if it is there."""
        big = max(0.0, self.length[before] + self._latest_lead(before, after))
        apart = self.start[after] - self.start[before]
        self._add(apart >= self.length[before] - big * (1 - self._leaves(after)), family, before, after)

    def _if_then_after(self, decision: Expression, before: int, after: int, gap: float, family: str) -> None:
        """Make `after` start at least `gap` later than `before` if `decision` is 1."""
        big = gap + self._latest_lead(before, after)
        if big > 0:
            self._add(self.start[after] - self.start[before] >= gap - big * (1 - decision), family, before, after)

    def _if_then_behind(self, decision: Expression, before: int, after: int, family: str) -> None:
        """Make `after` start when `before` has ended if `decision` is 1."""
        big = self.length[before] + float(self.variables.most_longer[before]) + self._latest_lead(before, after)
        if big > 0:
            apart = self.start[after] - self.start[before] - self._own_length(before)
            self._add(apart >= self.surely[before] - big * (1 - decision), family, before, after)

    def _one_op_at_a_time(self) -> None:
        for a, b in self._pairs(self.variables.order):
            if not self._moves(a):
                self._if_then_behind(self._is(self.variables.order, a, b), a, b, "one_op_at_a_time")

    def _channels(self) -> None:
        for a, b in self._pairs(self.variables.order):
            if self._moves(a):
                big = max(0.0, self.length[a] + self._latest_lead(a, b))
                apart = self.start[b] - self.start[a] - self.length[a] * self._leaves(a)
                unordered, absent = 1 - self._is(self.variables.order, a, b), 1 - self._leaves(b)
                self._add(apart >= -big * unordered - big * absent, "one_copy_at_a_time", a, b)

    def _reloads(self) -> None:
        started, ended = self.variables.started, self.variables.ended
        for x, r in self._pairs(started):
            lead = self._latest_lead(r, x) * self._is(started, x, r)
            self._add(self.start[x] >= self.start[r] - lead, "not_started", x, r)
        for x, r in self._pairs(ended):
            self._if_then_behind(self._is(ended, x, r), x, r, "ended_before")

    def _away(self) -> None:
        variables = self.variables
        for o, x in self._pairs(variables.away):
            away, reload = self._is(variables.away, o, x), self._partner(o, "R")
            self._add(away <= self._leaves(o), "away_if_it_leaves", o, x)
            self._if_then_after(away, o, x, self.length[o], "away_has_left")
            self._if_then_after(away, x, reload, 0.0, "away_comes_back")
            if self._moves(x):
                self._at_most(away, variables.order, x, reload, "away_unseen", o, x)
            else:
                self._at_most(away, variables.started, x, reload, "away_unseen", o, x)
                self._at_most(away, variables.order, self._partner(o, "F"), x, "away_after_forward", o, x)
                self._at_most(away, variables.order, x, self._partner(o, "B"), "away_before_backward", o, x)

    def _gone(self) -> None:
        variables = self.variables
        started, ended, order = variables.started, variables.ended, variables.order
        for n, way in enumerate(variables.recomputing):
            taken, own = self.columns[way.column], str(way.number)
            for x in self.ops:
                if variables.gone[n, x] < 0:
                    continue
                gone = self.columns[int(variables.gone[n, x])]
                self._add(gone <= taken, "gone_if_recomputed_" + own, way.forward, x)
                if self._moves(x):
                    over = ended if way.variant.inside else started
                    self._add(gone <= self._is(started, way.forward, x), "gone_after_forward_" + own, way.forward, x)
                    self._add(gone + self._is(over, way.end, x) <= 1, "gone_until_" + own, way.end, x)
                else:
                    self._add(gone <= self._is(order, way.forward, x), "gone_after_forward_" + own, way.forward, x)
                    self._add(gone <= self._is(order, x, way.end), "gone_until_" + own, x, way.end)
            for (number, kind, r), column in variables.beside.items():
                if number == n:
                    k = variables.running(way, kind)
                    runs = self._is(started, k, r) - self._is(ended, k, r)
                    self._add(self.columns[column] >= taken + runs - 1, "beside_" + own, k, r)

    def _at_most(self, decision: Expression, table: Table, a: int, b: int, family: str, *ops: int) -> None:
        if a != b and not (self._known(table, a, b) and table.constant[a, b] == 1):
            self._add(decision <= self._is(table, a, b), family, *ops)

    def _device_memory(self, device: int, budget: int) -> None:
        variables, unit = self.variables, self.variables.bytes_unit(device)
        compute = self._kinds("FBWC", device)
        take, free = ([float(size) for size in sizes] for sizes in (variables.take, variables.free))
        for x in compute:
            if variables.rises[x]:
                before = [(take[c] - free[c]) / unit * self._is(variables.order, c, x) for c in compute if c != x]
                level = take[x] / unit + pulp.lpSum(before) - self._not_there(device, x) + self._own_bytes(x, unit)
                self._add(level <= budget / unit, "memory", x)
        for r in self._kinds("R", device):
            taken = [take[c] / unit * self._is(variables.started, c, r) for c in compute]
            freed = [free[c] / unit * self._is(variables.ended, c, r) for c in compute]
            beside = [
                variables.recomputing[n].beside_bytes[kind] / unit * self.columns[column]
                for (n, kind, reload), column in variables.beside.items()
                if reload == r
            ]
            level = pulp.lpSum(taken) - pulp.lpSum(freed) - self._not_there(device, r) + pulp.lpSum(beside)
            self._add(level <= budget / unit, "memory", r)

    def _not_there(self, device: int, x: int) -> Expression:
        """Bytes that are away, or to be recomputed, when x starts."""
        variables, unit = self.variables, self.variables.bytes_unit(device)
        away = [variables.moved[o] / unit * self._is(variables.away, o, x) for o in self._kinds("O", device)]
        gone = [
            way.saved_bytes / unit * self.columns[int(variables.gone[n, x])]
            for n, way in enumerate(variables.recomputing)
            if variables.gone[n, x] >= 0
        ]
        return pulp.lpSum(away + gone)

    def _own_bytes(self, x: int, unit: float) -> Expression:
        """Bytes of F, C and B beyond those that they would take if their own activation were kept."""
        recomputing = [
            (beside - (0 if kind == "C" else way.saved_bytes)) / unit * self.columns[way.column]
            for way in self.variables.recomputing
            for kind, beside in way.beside_bytes.items()
            if self.variables.running(way, kind) == x
        ]
        fusing = [
            size / unit * self.columns[one.column]
            for one in self.variables.fused.values()
            for k, size in ((one.backward, one.start_bytes), (one.weight, -one.weight_bytes))
            if k == x
        ]
        return pulp.lpSum(recomputing + fusing)

    def _host_memory(self, limit: int) -> None:
        variables, unit = self.variables, self.variables.bytes_unit(None)
        offloads = [k for k in self.ops if variables.ops[k].kind[0] == "O"]
        for o, q in self._pairs(variables.counted):
            counted, ahead = self._is(variables.counted, o, q), self._is(variables.ahead, o, q)
            returned, reload = self._is(variables.returned, o, q), self._partner(o, "R")
            self._add(counted >= ahead + self._leaves(o) - 1 - returned, "on_host", o, q)
            big = max(0.0, self.length[reload] + self._latest_lead(reload, q))
            back = self.start[reload] + self.length[reload] * self._leaves(o)
            self._add(self.start[q] - back >= -big * (1 - returned), "returned", o, q)
        for o, q in self._pairs(variables.ahead):
            self._if_then_after(1 - self._is(variables.ahead, o, q), q, o, 0.0, "behind")
        moved = [float(size) / unit for size in variables.moved]
        for q in offloads:
            others = pulp.lpSum(moved[o] * self._is(variables.counted, o, q) for o in offloads)
            self._add(others + moved[q] * self._leaves(q) <= limit / unit, "host_memory", q)

    def _objective(self, device: int) -> None:
        compute, first = self._kinds("FBWC", device), self.variables.first_of(device)
        begin = self.columns[self.variables.begin[device]] if self.problem.objective == "device_span" else 0
        for x in compute if self.options.workloads else self.variables.last_of(device):
            others = compute if self.options.workloads else []
            after = pulp.lpSum(self.surely[k] * self._is(self.variables.order, x, k) for k in others)
            if x == first:
                after += pulp.lpSum(self._own_length(k) for k in others if k != x)
            ended = self.start[x] + self._own_length(x)
            self._add(self.value + begin - ended - after >= self.surely[x], "objective", x)

    def _chains(self) -> None:
        variables = self.variables
        for table in (variables.order, variables.started, variables.ended, variables.ahead, variables.returned):
            for a, b in self._pairs(table):
                if table.slope[a, b] > 0:
                    decision = self._is(table, a, b)
                    if variables.follows[a]:
                        self._at_most(decision, table, a - 1, b, "chain", a, b, a - 1, b)
                    if variables.leads[b]:
                        self._at_most(decision, table, a, b + 1, "chain", a, b, a, b + 1)

    def _work_before(self, device: int) -> None:
        first = self.variables.first_of(device)
        others = [k for k in self._kinds("FBWC", device) if k != first]
        begin = self.columns[self.variables.begin[device]]
        for x in others:
            before = pulp.lpSum(self.surely[a] * self._is(self.variables.order, a, x) for a in others)
            took = self.length[first] if first >= 0 else 0
            self._add(self.start[x] - begin - before >= took, "work_before", x)

    def _triangles(self, device: int) -> None:
        order = self.variables.order
        for three in combinations(self._kinds("FBWC", device), 3):
            if not any(self._known(order, a, b) for a, b in permutations(three, 2)):
                for a, b, c in (three, three[::-1]):
                    cycle = self._is(order, a, b) + self._is(order, b, c) + self._is(order, c, a)
                    self._add(cycle >= 1, "triangle", a, b, c)

    def _work_that_memory_holds_back(self) -> None:
        lengths = {(op.kind, op.stage): self.length[k] for k, op in enumerate(self.variables.ops)}
        fusing = {self.problem.stages[s].device for s in self.variables.fusing}
        for op, before, after in least_work_around(self.problem, lambda kind, s: lengths[kind, s]):
            if self.problem.stages[op.stage].device in fusing:
                continue
            x, first = self.variables.index[op], self.variables.first_of(self.problem.stages[op.stage].device)
            if x != first and isfinite(before):
                self._add(self.start[x] - self.start[first] >= before, "least_work_before", x)
            begin = self.start[first] if self.problem.objective == "device_span" else 0
            self._add(self.value + begin - self.start[x] >= after, "least_work_after", x)

    def _weight_order(self) -> None:
        order, index = self.variables.order, self.variables.index
        for backwards, weights in like_pairs(self.problem, self.variables.fusing):
            for turn in (1, -1):
                b, c = (index[op] for op in backwards[::turn])
                v, w = (index[op] for op in weights[::turn])
                said = order.may_be(v, w, 0) and order.may_be(b, c, 1)
                if said and not (self._known(order, v, w) and self._known(order, b, c)):
                    self._add(self._is(order, v, w) >= self._is(order, b, c), "weight_order", v, w)
