"""What precedences, horizon and budgets say about times: which orders are implied, and how large a big-M must be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from optpipe.orders import Op
from optpipe.problem import Problem, Stage
from solver.exact.rules import Edge, rule_edges

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

TOLERANCE = 1e-6
"""In units of the model: what HiGHS calls feasible."""

ROUNDS = 4
"""Each round fixes orders from the windows that the round before left; few pairs are fixed later."""


class Windows:
    """Times in units of the model, for ops by their index.

    `distance[a, b]`: b starts at least that much later than a, -inf where nothing orders them so. `earliest` and
    `latest`: bounds on starts. `widest[a, b]`: a starts at most that much later than b. `edges`: precedences that the
    model must state, those of the rules and those implied by budgets, the horizon and `value` (the largest objective
    of interest).
    """

    def __init__(
        self, problem: Problem, ops: Sequence[Op], unit_us: float, horizon: float, value: float, fix: bool
    ) -> None:
        self.problem = problem
        self.ops = ops
        self.index = {op: k for k, op in enumerate(ops)}
        self.horizon, self.value = horizon, min(value, horizon)
        self.length = np.array([problem.stages[op.stage].duration_us(op.kind) / unit_us for op in ops])
        self.surely = np.array([0.0 if op.kind in "OR" else 1.0 for op in ops]) * self.length
        self.device = np.array([problem.stages[op.stage].device for op in ops])
        self.computes = np.array([op.kind not in "OR" for op in ops])
        self.edges = [edge._replace(delay=edge.delay / unit_us) for edge in rule_edges(problem, self.index)]
        if fix:
            self.edges += [Edge(*edge, 0.0) for edge in _budget_edges(problem, self.index)]
        self._measure(())
        for _ in range(ROUNDS if fix else 0):
            if not self._fix_orders():
                break

    def implies(self, a: int | Ints, b: int | Ints) -> Bools:
        """Whether a always ends before b starts."""
        result: Bools = self.distance[a, b] > -np.inf
        return result

    def _fix_orders(self) -> bool:
        """State the orders of compute ops for which the windows leave no choice; False when there are none."""
        pairs = self.computes[:, None] & self.computes & (self.device[:, None] == self.device)
        np.fill_diagonal(pairs, False)
        known = self.distance > -np.inf
        free = pairs & ~known & ~known.T
        first = free & (self.widest < self.length[None, :] - TOLERANCE)  # b cannot come before a
        if not first.any() or (first & first.T).any():
            return False
        closed = (known | first).astype(np.float32)
        np.fill_diagonal(closed, 0)
        needed = first & ((closed @ closed) == 0)
        before = [Edge(int(a), int(b), 0.0) for a, b in np.argwhere(needed)]
        return self._measure(before)

    def _measure(self, more: Sequence[Edge]) -> bool:
        """Distances and windows with further edges; without change where they close a circle."""
        edges = [*self.edges, *more]
        source, target = (np.array([edge[k] for edge in edges], np.int64) for k in range(2))
        weight = np.array([self.surely[edge.before] + edge.delay for edge in edges])
        distance = longest_paths(len(self.ops), source, target, weight)
        if distance is None:
            return False
        self.edges = edges
        work = self._work_before(distance > -np.inf)
        first = self._first_ops()
        into = np.flatnonzero(self.computes & (work > 0))
        source, target = np.append(source, first[self.device[into]]), np.append(target, into)
        closer = longest_paths(len(self.ops), source, target, np.append(weight, work[into]))
        assert closer is not None, "a device's first op comes before all others"
        self.distance = closer
        self._set_windows()
        return True

    def _first_ops(self) -> Ints:
        """The op that begins each device: the first F of its lowest stage (-1 without stages)."""
        stages = self.problem.stages_of
        return np.array([self.index[Op("F", mine[0], 0)] if mine else -1 for mine in stages])

    def _work_before(self, before: Bools) -> Floats:
        """For each op, the time of all compute ops of its device that are always before it."""
        mine = before & (self.device[:, None] == self.device)
        np.fill_diagonal(mine, False)
        work: Floats = self.surely @ mine
        return work

    def _set_windows(self) -> None:
        reaches = self.distance > -np.inf
        same = self.device[:, None] == self.device
        others = reaches & same & ~np.eye(len(self.ops), dtype=bool)
        ends = self.distance + self.surely
        left_here = np.maximum(np.where(same, ends, -np.inf).max(axis=1), self.surely + others @ self.surely)
        first = self._first_ops()[self.device]
        self.earliest = self.distance[self.index[Op("F", 0, 0)]]
        self.latest = self._latest(np.maximum(ends.max(axis=1), left_here), left_here, first)
        since_first = self.distance[first, np.arange(len(self.ops))]
        within = self.value - left_here[:, None] - since_first
        self.widest = np.minimum(self.latest[:, None] - self.earliest, np.where(same, within, np.inf))
        self.widest = np.minimum(self.widest, -np.where(reaches, self.distance, -np.inf))

    def _latest(self, left: Floats, left_here: Floats, first: Ints) -> Floats:
        """Latest starts: every op leaves time for what follows, on the whole and on its device.

        The device of stage 0 begins at 0 and so ends by `value`; another ends by `value` after its own first op, which
        in turn leaves time for what follows on the device of stage 0.
        """
        latest = self.horizon - left
        root = np.flatnonzero(self.device == self.problem.stages[0].device)
        latest[root] = np.minimum(latest[root], self.value - left_here[root])
        before: Floats = (latest[root] - self.distance[:, root]).min(axis=1)
        latest = np.minimum(latest, before)
        return np.minimum(latest, latest[first] + self.value - left_here)


def _budget_edges(problem: Problem, index: dict[Op, int]) -> Iterator[tuple[int, int]]:
    """B(s,j) and W(s,j) that must come before F(s,i), because j and all later ones would not fit beside it."""
    for s, stage in enumerate(problem.stages):
        budget = problem.devices[stage.device].memory_bytes
        if budget is None:
            continue
        for kind, least in _least_bytes(stage):
            room = budget - stage.activation_bytes - stage.workspace_bytes.F
            behind = room // least + 1 if least and room >= 0 else problem.microbatches
            for i in range(behind, problem.microbatches):
                yield index[Op(kind, s, i - behind)], index[Op("F", s, i)]


def _least_bytes(stage: Stage) -> Iterator[tuple[str, int]]:
    """What a microbatch at least holds from the start of F to the end of B, and to the end of W."""
    stays = stage.activation_bytes - (stage.offload.bytes if stage.offload else 0)
    yield "B", stays
    yield "W", min(stays, stage.backward_weight_bytes)


def longest_paths(size: int, source: Ints, target: Ints, weight: Floats) -> Floats | None:
    """The longest path between every two nodes, -inf where there is none; None where edges close a circle."""
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
