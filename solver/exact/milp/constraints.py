"""Constraints of the mixed-integer program, one method a family, as blocks of rows; and its cuts (docs/math/milp.md).

A binary for each pair of ops decides which is first (Manne's disjunctive formulation, 1960; Zero Bubble, appendix G;
OptPipe, section 4). A row that holds only under a decision carries the least big-M that the windows allow for its pair
of ops: the smaller it is, the tighter the linear relaxation that HiGHS branches on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from math import inf

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from optpipe.ops import Bools, Floats, Ints, Op
from solver.exact.milp.variables import Options, Table, Variables
from solver.exact.rules import least_work_around, like_pairs


class Constraints:
    """Adds rows to `rows`, each family under its name: as in docs/math/milp.md, and in what `optpipe export` writes."""

    def __init__(self, variables: Variables, options: Options) -> None:
        self.variables = variables
        self.problem = variables.problem
        self.options = options
        self.rows = Rows()
        self.length = variables.windows.length
        self.widest = variables.windows.widest
        self.computes = variables.windows.computes

    def add_all(self) -> None:
        """All families."""
        self.precedences()
        self.begin()
        self.one_option()
        self.fused_backwards()
        self.one_op_at_a_time()
        self.channels()
        self.reload_order()
        self.away()
        self.gone()
        for d, device in enumerate(self.problem.devices):
            if device.memory_bytes is not None:
                self.level_at_compute(d, device.memory_bytes)
                self.level_at_reload(d, device.memory_bytes)
        self.host_memory()
        if self.options.chains:
            self.chains()
        if self.options.workloads:
            self.work_before()
        if self.options.triangles and self.problem.units <= self.options.triangle_microbatches:
            self.triangles()

    def precedences(self) -> None:
        """Rules of the problem and orders that the windows imply; an absent transfer takes no time."""
        edges = self.variables.windows.edges
        before, after = (np.array([edge[k] for edge in edges], np.int64) for k in range(2))
        delay = np.array([edge.delay for edge in edges])
        block = self.rows.block("precedence", (before, after), delay + self.variables.windows.surely[before])
        block.term(after, 1.0).term(before, -1.0)
        add_length_terms(block, self.variables, before, -1.0)

    def begin(self) -> None:
        """A device begins no later than any F that may be its first, where the order of microbatches is free."""
        if self.problem.has_free_order:
            for d, firsts in enumerate(self.variables.windows.firsts):
                block = self.rows.block("begin", (firsts,), np.zeros(len(firsts)))
                block.term(firsts, 1.0).term(int(self.variables.begin[d]), -1.0)

    def one_option(self) -> None:
        """An activation is held in one option; where it is reloaded and recomputed, in this order."""
        variables = self.variables
        for options in filter(None, variables.options.values()):
            block = self.rows.block("one_way", (np.array([options[0].forward]),), np.full(1, -1.0))
            for option in options:
                block.term(option.column, -1.0)
        again = [option.end for option in variables.recomputing if option.variant.ahead and option.variant.mode.offload]
        x = np.array(again, np.int64)
        r = variables.partners(x, "R")
        self._if_there("reloaded_before", r, x)
        pairs = np.array(self.variables.windows.if_there, np.int64).reshape(-1, 2)
        self._if_there("before_if_there", pairs[:, 0], pairs[:, 1])

    def fused_backwards(self) -> None:
        """W follows its B at once in a fused backward, which hands its gradient over at its end; other W keep order.

        The next backward of the stage begins no earlier either: without length it could stand between the two.
        """
        variables, edges = self.variables, self.variables.windows.edges
        fused = list(variables.fused.values())
        column, b, w = (np.array([one[k] for one in fused], np.int64) for k in range(3))
        big = np.maximum(self.widest[w, b] - self.length[b], 0.0)
        block = self.rows.block("fused_at_once", (b, w), -self.length[b] - big)
        block.term(b, 1.0).term(w, -1.0).term(column, -big)
        of_backward = {one.backward: one for one in fused}
        handed = [
            (of_backward[edge.before], edge)
            for edge in edges
            if edge.before in of_backward and variables.ops[edge.after].kind == "B"
        ]
        before, after = (np.array([edge[k] for _, edge in handed], np.int64) for k in range(2))
        delay = np.array([edge.delay for _, edge in handed])
        column, w = (np.array([one[k] for one, _ in handed], np.int64) for k in (0, 2))
        block = self.rows.block("after_fused", (before, after), self.length[before] + delay)
        block.term(after, 1.0).term(before, -1.0).term(column, -self.length[w])
        pairs = np.array(list(variables.overtaking()), np.int64).reshape(-1, 4).T
        first, second, v, w = pairs
        block = self.rows.block("weights_in_order", (v, w), np.zeros(len(v))).choice(variables.order, v, w, 1.0)
        block.term(first, 1.0).term(second, 1.0)
        block.choice(variables.before, variables.microbatch[v], variables.microbatch[w], -1.0)
        column, w, b = np.array(list(variables.taking_turns()), np.int64).reshape(-1, 3).T
        block = self.rows.block("after_fused", (w, b), np.full(len(b), -1.0))
        block.choice(variables.order, w, b, 1.0).term(column, -1.0)
        block.choice(variables.before, variables.microbatch[w], variables.microbatch[b], -1.0)

    def _if_there(self, family: str, before: Ints, after: Ints) -> None:
        """`after`, which may be absent, starts when `before` has ended if it is there."""
        big = np.maximum(self.length[before] + self.widest[before, after], 0.0)
        block = self.rows.block(family, (before, after), self.length[before] - big)
        block.term(after, 1.0).term(before, -1.0).term(self.variables.leaves[after], -big)

    def _after(
        self, family: str, table: Table, pair: tuple[Ints, Ints], before: Ints, after: Ints, gap: Floats | None = None
    ) -> None:
        """`after` starts `gap` later than `before` (None: when that ends) where the decision of `pair` is yes."""
        # Without the decision the row must hold for any starts: `before` is at most `widest` later than `after`.
        surely = self.variables.windows.surely[before] if gap is None else gap
        most = self.length[before] + self.variables.most_longer[before] if gap is None else gap
        big = most + self.widest[before, after]
        needed = big > 0  # else the windows imply the row
        a, b, before, after, big, surely = (array[needed] for array in (*pair, before, after, big, surely))
        block = self.rows.block(family, (before, after), surely - big)
        block.term(after, 1.0).term(before, -1.0).choice(table, a, b, -big)
        if gap is None:
            add_length_terms(block, self.variables, before, -1.0)

    def _both_orders(self, compute: bool) -> tuple[Ints, Ints]:
        a, b = self.variables.order.open_pairs()
        chosen = self.computes[a] == compute
        a, b = a[chosen], b[chosen]
        return np.append(a, b), np.append(b, a)

    def one_op_at_a_time(self) -> None:
        """A device runs one compute op at a time (Zero Bubble, appendix G)."""
        a, b = self._both_orders(compute=True)
        self._after("one_op_at_a_time", self.variables.order, (a, b), a, b)

    def channels(self) -> None:
        """A channel carries one transfer at a time (OptPipe, section 4); an absent one constrains no other."""
        a, b = self._both_orders(compute=False)
        leaves = self.variables.leaves
        big = np.maximum(self.length[a] + self.widest[a, b], 0.0)
        block = self.rows.block("one_copy_at_a_time", (a, b), -2 * big)
        block.term(b, 1.0).term(a, -1.0).choice(self.variables.order, a, b, -big)
        block.term(leaves[a], -self.length[a]).term(leaves[b], -big)

    def reload_order(self) -> None:
        """An op that does not count as started starts no earlier than the reload, one that has ended ends before it.

        Only these directions are needed: to count an op as started, or not as ended, only raises the level.
        """
        started, ended = self.variables.started, self.variables.ended
        x, r = started.open_pairs()
        block = self.rows.block("not_started", (x, r), np.zeros(len(x)))
        block.term(x, 1.0).term(r, -1.0).choice(started, x, r, self.widest[r, x])
        x, r = ended.open_pairs()
        self._after("ended_before", ended, (x, r), x, r)

    def away(self) -> None:
        """Activations away at x: each left before x starts and returns no earlier (OptPipe, section 4)."""
        variables, away = self.variables, self.variables.away
        o, x = away.open_pairs()
        reload, forward, backward = (variables.partners(o, kind) for kind in "RFB")
        block = self.rows.block("away_if_it_leaves", (o, x), np.zeros(len(o)))
        block.term(variables.leaves[o], 1.0).choice(away, o, x, -1.0)
        self._after("away_has_left", away, (o, x), o, x, self.length[o])
        self._after("away_comes_back", away, (o, x), x, reload, np.zeros(len(o)))
        # Times alone let two ops that start at one instant each take the other's bytes as absent: x must count where
        # the reload of what is away at x starts.
        compute = self.computes[x]
        at_compute, at_copy = (o[compute], x[compute]), (o[~compute], x[~compute])
        self._at_most("away_unseen", away, at_compute, variables.started, x[compute], reload[compute])
        self._at_most("away_unseen", away, at_copy, variables.order, x[~compute], reload[~compute])
        # The times imply these where ops have a length; the linear relaxation needs them to keep `away` within F to B.
        self._at_most("away_after_forward", away, at_compute, variables.order, forward[compute], x[compute])
        self._at_most("away_before_backward", away, at_compute, variables.order, x[compute], backward[compute])

    def gone(self) -> None:
        """Bytes that recomputation saves are gone at x after F and before C, or B where it recomputes inside.

        These columns follow from binaries, and need not be any themselves. A reload runs beside compute: F, C or B of
        the activation may run when it starts, with what they take then.
        """
        variables = self.variables
        n, x = np.nonzero(variables.gone >= 0)
        gone = variables.gone[n, x]
        column, forward, end = (
            np.array([getattr(option, name) for option in variables.recomputing], np.int64)[n]
            for name in ("column", "forward", "end")
        )
        self.rows.block("if_recomputed", (gone,), np.zeros(len(n))).term(column, 1.0).term(gone, -1.0)
        compute = self.computes[x]
        inside = np.array([option.variant.inside for option in variables.recomputing], bool)[n]
        for family, chosen, table, a, b in (
            ("after_forward", compute, variables.order, forward, x),
            ("until_recomputed", compute, variables.order, x, end),
            ("after_forward", ~compute, variables.started, forward, x),
        ):
            block = self.rows.block(family, (gone[chosen],), np.zeros(int(chosen.sum())))
            block.choice(table, a[chosen], b[chosen], 1.0).term(gone[chosen], -1.0)
        for chosen, table in ((~compute & ~inside, variables.started), (~compute & inside, variables.ended)):
            block = self.rows.block("until_recomputed", (gone[chosen],), np.full(int(chosen.sum()), -1.0))
            block.choice(table, end[chosen], x[chosen], -1.0).term(gone[chosen], -1.0)
        beside = [(variables.recomputing[n], kind, r, c) for (n, kind, r), c in variables.beside.items()]
        y = np.array([option.column for option, _, _, _ in beside], np.int64)
        k = np.array([variables.running(option, kind) for option, kind, _, _ in beside], np.int64)
        r = np.array([r for _, _, r, _ in beside], np.int64)
        running = np.array([c for *_, c in beside], np.int64)
        block = self.rows.block("while_it_runs", (running,), np.full(len(beside), -1.0)).term(running, 1.0)
        block.term(y, -1.0).choice(variables.started, k, r, -1.0).choice(variables.ended, k, r, 1.0)

    def _at_most(self, family: str, table: Table, pair: tuple[Ints, Ints], limit: Table, a: Ints, b: Ints) -> None:
        """``table[pair] <= limit[a, b]``, where that is not fixed to 1; an op compared with itself is left out."""
        needed = (limit.is_open(a, b) | (limit.constant[a, b] == 0)) & (a != b)
        a, b, first, second = a[needed], b[needed], pair[0][needed], pair[1][needed]
        names = (first, second, a, b) if limit is table else (first, second)
        block = self.rows.block(family, names, np.zeros(len(a)))
        block.choice(limit, a, b, 1.0).choice(table, first, second, -1.0)

    def level_at_compute(self, device: int, budget: int) -> None:
        """Memory when a compute op starts: what earlier ones left, less what is away, fits (Zero Bubble, appendix G).

        Levels rise only where an op starts that takes memory, so no other time needs a row.
        """
        variables = self.variables
        compute, offloads = variables.of("FBWC", device), variables.of("O", device)
        takers = compute[variables.rises[compute]]
        unit = variables.bytes_unit(device)
        kept = (variables.take - variables.free) / unit
        block = self.rows.block("memory", (takers,), (variables.take[takers] - budget) / unit)
        block.choices(variables.order, compute, takers, -kept[compute])
        block.choices(variables.away, offloads, takers, variables.moved[offloads] / unit)
        self._add_gone(block, takers, unit)
        for one in variables.fused.values():
            block.term(one.column, -one.start_bytes / unit, takers == one.backward)
            block.term(one.column, one.weight_bytes / unit, takers == one.weight)
        for option in variables.recomputing:
            for kind, beside in option.beside_bytes.items():
                # F begins without what is saved, and a backward that recomputes inside is the end of that.
                less = 0 if kind == "C" else option.saved_bytes
                block.term(option.column, (less - beside) / unit, takers == variables.running(option, kind))

    def _add_gone(self, block: Block, ops: Ints, unit: float) -> None:
        """Subtract from the level at each op what recomputation saves then."""
        for n, option in enumerate(self.variables.recomputing):
            columns = self.variables.gone[n, ops]
            block.term(columns, option.saved_bytes / unit, columns >= 0)

    def level_at_reload(self, device: int, budget: int) -> None:
        """Memory when a reload starts: what has started, less what has ended and what else is away, fits.

        A reload runs beside compute, so the op that runs counts with what it takes and not yet with what it frees.
        """
        variables = self.variables
        compute, offloads, reloads = (variables.of(kinds, device) for kinds in ("FBWC", "O", "R"))
        unit = variables.bytes_unit(device)
        take, free, moved = (values / unit for values in (variables.take, variables.free, variables.moved))
        block = self.rows.block("memory", (reloads,), np.full(len(reloads), -budget / unit))
        block.choices(variables.started, compute, reloads, -take[compute])
        block.choices(variables.ended, compute, reloads, free[compute])
        block.choices(variables.away, offloads, reloads, moved[offloads])
        self._add_gone(block, reloads, unit)
        for (n, kind, r), column in variables.beside.items():
            block.term(column, -variables.recomputing[n].beside_bytes[kind] / unit, reloads == r)

    def host_memory(self) -> None:
        """Host memory when an offload starts: what left before it and has not come back fits."""
        variables, limit = self.variables, self.problem.host_memory_bytes
        o, q = variables.counted.open_pairs()
        if limit is None:
            return
        reload = np.array([variables.partner(k, "R") for k in o], np.int64)
        block = self.rows.block("on_host", (o, q), np.full(len(o), -1.0)).choice(variables.counted, o, q, 1.0)
        block.choice(variables.ahead, o, q, -1.0).choice(variables.returned, o, q, 1.0)
        block.term(variables.leaves[o], -1.0)  # counted >= ahead + leaves - 1 - returned
        a, b = variables.ahead.open_pairs()
        a, b = np.append(a, b), np.append(b, a)  # a is not ahead of b: a starts no earlier
        self._after("behind", variables.ahead, (b, a), b, a, np.zeros(len(a)))
        big = np.maximum(self.length[reload] + self.widest[reload, q], 0.0)
        block = self.rows.block("returned", (o, q), -big)
        block.term(q, 1.0).term(reload, -1.0).choice(variables.returned, o, q, -big)
        block.term(variables.leaves[o], -self.length[reload])
        offloads = np.concatenate([variables.of("O", d) for d in range(len(self.problem.devices))])
        unit = variables.bytes_unit(None)
        moved = variables.moved / unit
        block = self.rows.block("host_memory", (offloads,), np.full(len(offloads), -limit / unit))
        block.term(variables.leaves[offloads], -moved[offloads])
        block.choices(variables.counted, offloads, offloads, -moved[offloads])

    def chains(self) -> None:
        """Order binaries agree along units: if one op precedes another, so does the same op of an earlier unit.

        Units keep their order, so every integer point has it; the relaxation does not (OptPipe, section 4). Where the
        order of microbatches is free, this holds along equal ones and along the slices of each.
        """
        variables = self.variables
        for table in (variables.order, variables.started, variables.ended, variables.ahead, variables.returned):
            a, b = table.open_pairs()
            has_before, has_next = variables.follows[a], variables.leads[b]
            self._at_most("chain", table, (a[has_before], b[has_before]), table, a[has_before] - 1, b[has_before])
            self._at_most("chain", table, (a[has_next], b[has_next]), table, a[has_next], b[has_next] + 1)

    def work_before(self) -> None:
        """An op starts no earlier than its device begins, and all work ordered before it.

        Implied for whole binaries, since a device runs one op at a time. In the linear relaxation, where fractional
        binaries make the rows with a big-M slack, it keeps the work of the device in the bound.
        """
        for device, stages in enumerate(self.problem.stages_of):
            if stages:
                first = self.variables.first_of(device)
                compute = self.variables.of("FBWC", device)
                others = compute[compute != first]
                least = np.full(len(others), self.length[first] if first >= 0 else 0.0)
                block = self.rows.block("work_before", (others,), least)
                block.term(others, 1.0).term(int(self.variables.begin[device]), -1.0)
                block.choices(self.variables.order, others, others, -self.variables.windows.surely[others])

    def triangles(self) -> None:
        """The orders of three ops of a device form no cycle, in either direction.

        OptPipe's triangle cuts (section 4): the 3-dicycle inequalities of the linear ordering polytope (Grötschel,
        Jünger and Reinelt 1985). Their number grows with the cube of a device's ops.
        """
        order = self.variables.order
        for device in range(len(self.problem.devices)):
            ops = self.variables.of("FBWC", device)
            a, b, c = ops[np.array(list(combinations(range(len(ops)), 3)), np.int64).reshape(-1, 3).T]
            undecided = order.is_open(a, b) & order.is_open(b, c) & order.is_open(a, c)
            a, b, c = a[undecided], b[undecided], c[undecided]
            for x, y, z in ((a, b, c), (c, b, a)):
                block = self.rows.block("triangle", (x, y, z), np.ones(len(a)))
                block.choice(order, x, y, 1.0).choice(order, y, z, 1.0).choice(order, z, x, 1.0)


def add_length_terms(block: Block, variables: Variables, ops: Ints, sign: float, only: Bools | bool = True) -> None:
    """Add to each row the part of its op's length that is decided: what is absent, or recomputes inside B."""
    block.term(variables.leaves[ops], sign * variables.windows.length[ops], (variables.leaves[ops] >= 0) & only)
    for n in range(max(map(len, variables.longer.values()), default=0)):
        terms = [variables.longer.get(int(k), [])[n : n + 1] or [(-1, 0.0)] for k in ops]
        columns, times = (np.array([term[0][part] for term in terms]) for part in range(2))
        block.term(columns, sign * times, (columns >= 0) & only)


def add_work_that_memory_holds_back(variables: Variables, rows: Rows) -> None:
    """An op begins no sooner than its device can have done what it must, and leaves time for what is left.

    The rows on memory say so only for whole binaries; these hold in the linear relaxation too (docs/math/bounds.md).
    They suppose that microbatches are whole and alike, and are left out where they are not.
    """

    def length(kind: str, s: int) -> float:
        return float(variables.windows.length[variables.index[Op(kind, s, 0)]])

    if not variables.alike:
        return
    fusing = {variables.problem.stages[s].device for s in variables.fusing}
    least = [
        bound
        for bound in least_work_around(variables.problem, length)
        if variables.problem.stages[bound.op.stage].device not in fusing
    ]
    ops = np.array([variables.index[bound.op] for bound in least], np.int64)
    before, after = np.array([bound.before for bound in least]), np.array([bound.after for bound in least])
    device = variables.windows.device[ops]
    first = np.array([variables.first_of(d) if stages else -1 for d, stages in enumerate(variables.problem.stages_of)])
    bounded = (before < inf) & (first[device] != ops)
    block = rows.block("least_work_before", (ops[bounded],), before[bounded])
    block.term(ops[bounded], 1.0).term(first[device[bounded]], -1.0)
    block = rows.block("least_work_after", (ops,), after).term(variables.objective, 1.0).term(ops, -1.0)
    if variables.problem.objective == "device_span":
        block.term(first[device], 1.0)


def add_weight_order(variables: Variables, rows: Rows) -> None:
    """W of like stages run in the order of their B: a symmetry (`solver.exact.rules`)."""
    pairs = [
        [variables.index[op] for op in (*backwards, *weights)]
        for backwards, weights in like_pairs(variables.problem, variables.fusing)
    ]
    order = variables.order
    for columns in ((0, 1, 2, 3), (1, 0, 3, 2)):
        b, c, v, w = np.array(pairs, np.int64).reshape(-1, 4).T[list(columns)]
        needed = order.may_be(v, w, 0) & order.may_be(b, c, 1) & (order.is_open(b, c) | order.is_open(v, w))
        b, c, v, w = b[needed], c[needed], v[needed], w[needed]
        rows.block("weight_order", (v, w), np.zeros(len(b))).choice(order, v, w, 1.0).choice(order, b, c, -1.0)


class Rows:
    """Rows ``terms >= lower`` under construction; all are written with that sense."""

    def __init__(self) -> None:
        self.rows: list[Ints] = []
        self.columns: list[Ints] = []
        self.values: list[Floats] = []
        self.lower: list[Floats] = []
        self.families: list[tuple[str, tuple[Ints, ...]]] = []
        self.count = 0

    def block(self, family: str, columns: tuple[Ints, ...], lower: Floats) -> Block:
        """Add one row for each entry of `lower`; it is named by the family and by its columns of ops or decisions."""
        block = Block(self, np.arange(self.count, self.count + len(lower)), np.array(lower, np.float64))
        self.count += len(lower)
        self.lower.append(block.lower)
        self.families.append((family, columns))
        return block

    def names(self, columns: Sequence[str]) -> list[str]:
        """A name for each row, such as `memory_F0_1`, from names of the columns; a second one of a name is numbered."""
        seen: Counter[str] = Counter()
        names = []
        for family, ops in self.families:
            for at in zip(*ops, strict=True):
                name = "_".join([family, *(columns[column] for column in at)])
                seen[name] += 1
                names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
        return names

    def matrix(self, columns: int) -> tuple[csr_matrix, Floats]:
        """The coefficients, duplicates added up, and the lower bounds of the rows."""
        rows, cols, values = (np.concatenate(parts) for parts in (self.rows, self.columns, self.values))
        matrix = csr_matrix((values, (rows, cols)), shape=(self.count, columns))
        matrix.eliminate_zeros()
        return matrix, np.concatenate(self.lower)


class Block:
    """Rows that are being filled: each call adds one term to every row."""

    def __init__(self, target: Rows, rows: Ints, lower: Floats) -> None:
        self.target, self.rows, self.lower = target, rows, lower

    def term(self, columns: Ints | int, values: Floats | float, only: Bools | bool = True) -> Block:
        """Add ``values * columns``, one column a row, in the rows where `only` holds."""
        keep = np.broadcast_to(only, self.rows.shape)
        self.target.rows.append(self.rows[keep])
        self.target.columns.append(np.broadcast_to(columns, self.rows.shape)[keep].astype(np.int64))
        self.target.values.append(np.broadcast_to(values, self.rows.shape)[keep].astype(np.float64))
        return self

    def choice(self, table: Table, a: Ints, b: Ints, values: Floats | float) -> Block:
        """Add ``values * table[a, b]``; what is fixed of it goes to the right-hand side."""
        self.lower -= values * table.constant[a, b]
        return self.term(table.column[a, b], values * table.slope[a, b], table.column[a, b] >= 0)

    def choices(self, table: Table, a: Ints, b: Ints, values: NDArray[np.float64]) -> Block:
        """Add to row k the sum over j of ``values[j] * table[a[j], b[k]]``; here b is an op for each row."""
        at = np.ix_(a, b)
        self.lower -= values @ table.constant[at]
        for j in range(len(a)):
            self.term(table.column[at][j], values[j] * table.slope[at][j], table.column[at][j] >= 0)
        return self
