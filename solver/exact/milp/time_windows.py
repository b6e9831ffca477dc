"""Time windows of the mixed-integer program: what precedences, budgets and the horizon leave to the start of each op.

They fix the order of pairs of ops without a choice, and bound the big-M of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from optpipe.ops import Bools, Floats, Ints, Op
from optpipe.problem import Problem
from optpipe.stage import Stage
from solver.bounds.device import ended_before
from solver.exact.rules import Edge, microbatches_in_order, rule_edges, units_before
from solver.variants import variants

TOLERANCE = 1e-6
"""In units of the model: what HiGHS calls feasible."""

ROUNDS = 4
"""Rounds of fixing orders, each from the windows that the round before left; few pairs are fixed later."""


class TimeWindows:
    """Times in units of the model, for ops by their index: heads and tails (Carlier 1982), here between any two ops.

    `distance[a, b]`: b starts at least that much later than a, -inf where nothing orders them so. `earliest` and
    `latest`: bounds on starts. `widest[a, b]`: a starts at most that much later than b. `edges`: precedences that the
    model must state, those of the rules and those implied by budgets, the horizon and `value` (the largest objective
    of interest). Orders that follow are OptPipe's variable fixing (section 4). `surely`: durations, 0 for ops that may
    be absent. `firsts`: for each device the ops one of which is its first, F of its lowest stage. `if_there`:
    precedences that hold only if the second op is there. With slices R and C run in another order than F and O, and an
    absent one that kept both orders would delay others.
    """

    def __init__(
        self,
        problem: Problem,
        ops: Sequence[Op],
        durations: Floats,
        unit_us: float,
        horizon: float,
        value: float,
        *,
        fusing: Collection[int],
        fix: bool,
    ) -> None:
        """`durations` by op, `horizon` and `value` in units of `unit_us`.

        `fusing`: stages whose W may overtake one another. `fix`: add the precedences that budgets imply, and the orders
        that follow from the windows.
        """
        self.problem = problem
        self.ops = ops
        self.index = {op: k for k, op in enumerate(ops)}
        self.horizon, self.value = horizon, min(value, horizon)
        self.length = durations
        self.surely = np.array([0.0 if op.kind[0] in "ORC" else 1.0 for op in ops]) * self.length
        self.device = np.array([problem.stages[op.stage].device for op in ops])
        first_units = [group[0] * problem.slice_count for group in microbatches_in_order(problem)]
        self.firsts = [
            np.array([self.index[Op("F", s, i)] for s in stages[:1] for i in first_units], np.int64)
            for stages in problem.stages_of
        ]
        self.computes = np.array([op.kind[0] not in "OR" for op in ops])
        edges = [edge._replace(delay=edge.delay / unit_us) for edge in rule_edges(problem, self.index)]
        edges += [Edge(*edge, 0.0) for edge in _variant_edges(problem, self.index)]
        kinds = [op.kind[0] for op in ops]
        loose = {("O", "R"), ("F", "C")} if problem.slice_count > 1 else set()
        edges = [
            edge
            for edge in edges
            if (kinds[edge.after], kinds[edge.before]) != ("W", "W") or ops[edge.after].stage not in fusing
        ]
        for before, after, delay in list(edges):  # where no backward is split, W is the end of it
            if kinds[before] == kinds[after] == "B" and not problem.stages[ops[before].stage].split_backward:
                edges.append(Edge(self.index[ops[before]._replace(kind="W")], after, delay))
        self.if_there = [(a, b) for a, b, _ in edges if (kinds[a], kinds[b]) in loose]
        self.edges = [edge for edge in edges if (kinds[edge.before], kinds[edge.after]) not in loose]
        for _, k in self.if_there:  # where it is absent, one that runs later has no more than begun its microbatch
            first = self.ops[k].microbatch // problem.slice_count * problem.slice_count
            self.edges.append(Edge(self.index[Op("F", self.ops[k].stage, first)], k, 0.0))
        if fix and not problem.has_free_order:
            self.edges += [Edge(*edge, 0.0) for edge in _budget_edges(problem, self.index, fusing)]
        self._measure(())
        for _ in range(ROUNDS if fix else 0):
            if not self._fix_orders():
                break

    def implies(self, a: int | Ints, b: int | Ints) -> Bools:
        """True if a always ends before b starts."""
        result: Bools = self.distance[a, b] > -np.inf
        return result

    def _fix_orders(self) -> bool:
        """State the orders of compute ops for which the windows leave no choice; False when there are none."""
        pairs = self.computes[:, None] & self.computes & (self.device[:, None] == self.device)
        np.fill_diagonal(pairs, False)
        ordered = self.distance > -np.inf
        free = pairs & ~ordered & ~ordered.T
        first = free & (self.widest < self.surely[None, :] - TOLERANCE)  # b cannot come before a
        if not first.any() or (first & first.T).any():
            return False
        # An edge is redundant where two others lead from a to b: only the transitive reduction is stated.
        closed = (ordered | first).astype(np.float32)
        np.fill_diagonal(closed, 0)
        needed = first & ((closed @ closed) == 0)
        before = [Edge(int(a), int(b), 0.0) for a, b in np.argwhere(needed)]
        return self._measure(before)

    def _measure(self, more: Sequence[Edge]) -> bool:
        """Distances and windows with further edges; without change, and False, where they close a cycle."""
        edges = [*self.edges, *more]
        source, target = (np.array([edge[k] for edge in edges], np.int64) for k in range(2))
        weight = np.array([self.surely[edge.before] + edge.delay for edge in edges])
        distance = longest_paths(len(self.ops), source, target, weight)
        if distance is None:
            return False
        self.edges = edges
        # A device runs one op at a time: an op starts no earlier than the device's first op and the work of all ops of
        # the device that are always before it.
        before = (distance > -np.inf) & (self.device[:, None] == self.device)
        np.fill_diagonal(before, False)
        work: Floats = np.where(self.computes, self.surely @ before, 0.0)
        if not self.problem.has_free_order:
            first = np.array([firsts[0] if len(firsts) else -1 for firsts in self.firsts])
            into = np.flatnonzero(work > 0)
            source, target = np.append(source, first[self.device[into]]), np.append(target, into)
            distance = longest_paths(len(self.ops), source, target, np.append(weight, work[into]))
            assert distance is not None, "a device's first op comes before all others"
        self.distance = distance
        self._set_windows(work)
        return True

    def _set_windows(self, work: Floats) -> None:
        """Earliest and latest starts; `work` of the device of an op is always done before it."""
        reaches = self.distance > -np.inf
        same = self.device[:, None] == self.device
        others = reaches & same & ~np.eye(len(self.ops), dtype=bool)
        # Tails: time from an op's start to the end of all that follows it on its device, and anywhere.
        ends = self.distance + self.surely
        device_tail = np.maximum(np.where(same, ends, -np.inf).max(axis=1), self.surely + others @ self.surely)
        root_device = self.problem.stages[0].device
        self.earliest = self.distance[self.firsts[root_device]].max(axis=0)
        since_begin = np.zeros(len(self.ops))
        for d, firsts in enumerate(self.firsts):
            own = self.device == d
            since_begin[own] = self.distance[firsts][:, own].max(axis=0, initial=0.0)
        if self.problem.has_free_order:  # else the distances from a device's first op say all this
            since_begin = np.maximum(since_begin, work)
            begin = np.array([self.earliest[firsts].min(initial=np.inf) for firsts in self.firsts])
            earliest = np.maximum(self.earliest, begin[self.device] + since_begin)
            self.earliest = (earliest[:, None] + self.distance).max(axis=0)
        # The device of stage 0 begins at 0 and so ends by `value`; another ends by `value` after its own first op,
        # which in turn leaves time for what follows on the device of stage 0.
        latest = self.horizon - np.maximum(ends.max(axis=1), device_tail)
        root = np.flatnonzero(self.device == root_device)
        latest[root] = np.minimum(latest[root], self.value - device_tail[root])
        latest = np.minimum(latest, (latest[root] - self.distance[:, root]).min(axis=1))
        latest_begin = np.array([latest[firsts].min(initial=np.inf) for firsts in self.firsts])
        self.latest: Floats = np.minimum(latest, latest_begin[self.device] + self.value - device_tail)
        within = self.value - device_tail[:, None] - since_begin
        self.widest = np.minimum(self.latest[:, None] - self.earliest, np.where(same, within, np.inf))
        self.widest = np.minimum(self.widest, -np.where(reaches, self.distance, -np.inf))


def _variant_edges(problem: Problem, index: dict[Op, int]) -> Iterator[tuple[int, int]]:
    """Precedences of the ops of variants; absent ones, without length, keep them too.

    R before C is not among these: where both are absent, C may have to come before a reload of an earlier microbatch.
    """
    earlier = {kind: units_before(problem, kind) for kind in "ORC"}
    for (kind, s, i), k in index.items():
        if not kind[1:]:
            continue
        yield index[Op("O" + kind[1:] if kind[0] == "R" else "F", s, i)], k
        if kind[0] in "RC":
            yield k, index[Op("B", s, i)]
        if i in earlier[kind[0]]:
            for n in range(len(variants(problem.stages[s]))):
                before = Op(f"{kind[0]}{n}", s, earlier[kind[0]][i])
                if before in index and before.kind != kind:
                    yield index[before], k


def _budget_edges(problem: Problem, index: dict[Op, int], fusing: Collection[int]) -> Iterator[tuple[int, int]]:
    """B(s,j) and W(s,j) that must come before F(s,i), because j and all later ones would not fit with it.

    Those that have ended are the first ones in the order of the backwards.
    """
    backwards = problem.units_in_order("B")
    for s, of_classes in enumerate(problem.unit_stages):
        budget = problem.devices[problem.stages[s].device].memory_bytes
        if budget is None:
            continue
        # The least that a unit holds from the start of F to the end of B, and to the end of W.
        stays, taken = (
            np.array(sizes)[problem.unit_class] for sizes in zip(*map(_least_bytes, of_classes), strict=True)
        )
        left = np.array([stage.backward_weight_bytes for stage in of_classes])[problem.unit_class]
        held = [("B", stays), ("W", np.minimum(stays, left))]
        if s in fusing:
            held = [("B" if problem.stages[s].split_backward else "W", stays)]
        for kind, least in held:
            # Where F itself does not fit, or waits for a backward that waits for it, there is no schedule at all.
            first = np.arange(problem.units) // problem.slice_count * problem.slice_count
            count = ended_before(least, budget - taken, backwards)
            for i in np.flatnonzero((count > 0) & (count <= first)).tolist():
                yield index[Op(kind, s, int(backwards[count[i] - 1]))], index[Op("F", s, i)]


def _least_bytes(stage: Stage) -> tuple[int, int]:
    """The least bytes between F and B in any variant, and at the start of F."""
    options = variants(stage)
    taken = min(option.mode.kept_bytes + option.mode.forward_workspace_bytes for option in options)
    return min(option.waiting_bytes for option in options), taken + stage.workspace_bytes.F


def longest_paths(size: int, source: Ints, target: Ints, weight: Floats) -> Floats | None:
    """The longest path between every two nodes, -inf where there is none; None where edges close a cycle."""
    into: list[list[int]] = [[] for _ in range(size)]
    out: list[list[int]] = [[] for _ in range(size)]
    for e, (a, b) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        into[b].append(e)
        out[a].append(b)
    distance = np.full((size, size), -np.inf)  # transposed while it grows: row b holds the paths to b
    open_edges = [len(edges) for edges in into]
    ready = [k for k in range(size) if not open_edges[k]]
    for k in ready:
        if into[k]:
            distance[k] = (distance[source[into[k]]] + weight[into[k], None]).max(axis=0)
        distance[k, k] = 0.0
        for after in out[k]:
            open_edges[after] -= 1
            if not open_edges[after]:
                ready.append(after)
    return distance.T.copy() if len(ready) == size else None
