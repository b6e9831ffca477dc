"""Simulation: start and end times of given orders under the rules of the model.

Every op starts as soon as its stream, dependencies, channel and waits allow. For the objective `device_span` the first
op of each device is then delayed so that the largest span is smallest; orders and waits do not change.

Orders define a precedence graph; each device may start at any time. Let D[d, e] be the longest path from the first op
of device d to the end of the last op of device e. The requirement that no span exceeds S adds an edge of length -S from
each device's end to its start; a feasible timing exists exactly if no cycle is longer than 0, and a cycle through k
devices has length (sum of k entries of D) - k S. So the smallest span is the maximum cycle mean of D: the period of
successive iterations when no device waits for a global barrier (Zero Bubble, post-validation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.costs import Costs
from optpipe.errors import DeadlockError, OrderError
from optpipe.kinds import KINDS, STREAM_OF_KIND, STREAMS
from optpipe.memory import Curve, memory_curve
from optpipe.ops import Op, OpArray, Orders, WaitArray
from optpipe.problem import Problem
from optpipe.stage import Mode

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

F, B, W, BW, O, R, C, CB, CBW = range(len(KINDS))  # noqa: E741 (the field's names for ops)


@dataclass(frozen=True)
class Simulation:
    """Times of orders: `ops[k]` runs on `device[k]` (ascending) from `start_us[k]` to `end_us[k]`.

    `modes` are those of the orders.
    """

    problem: Problem
    ops: OpArray
    device: Ints
    start_us: Floats
    end_us: Floats
    modes: Ints | None = None

    @cached_property
    def index(self) -> dict[Op, int]:
        """Index of each op in the arrays."""
        return {op: k for k, op in enumerate(self.ops)}

    @property
    def makespan_us(self) -> float:
        """Last end minus first start over all devices."""
        return float(self.end_us.max() - self.start_us.min())

    @property
    def spans_us(self) -> Sequence[float]:
        """Last end minus first start of each device (0 for a device without stages)."""
        slices = [self.device_slice(d) for d in range(len(self.problem.devices))]
        return [float(self.end_us[s].max() - self.start_us[s].min()) if s.start < s.stop else 0.0 for s in slices]

    @property
    def value_us(self) -> float:
        """Value of the problem's objective."""
        return self.makespan_us if self.problem.objective == "makespan" else max(self.spans_us)

    def device_slice(self, device: int) -> slice:
        """Slice of the arrays with the ops of a device."""
        return slice(*np.searchsorted(self.device, (device, device + 1)).tolist())

    def device_memory(self, device: int) -> Curve:
        """Activation memory of a device over time."""
        ops = self.device_slice(device)
        return memory_curve(self.start_us[ops], self.end_us[ops], self._device_effects[ops])

    def host_memory(self) -> Curve:
        """Offloaded bytes of all devices on the host over time; what comes and goes at an instant is there at it."""
        copies = np.flatnonzero((self.ops.kind == O) | (self.ops.kind == R))
        ops, start_us, end_us = self.ops[copies], self.start_us[copies], self.end_us[copies]
        left_us = np.full((len(self.problem.stages), self.problem.units), np.nan)
        offloads = ops.kind == O
        left_us[ops.stage[offloads], ops.microbatch[offloads]] = start_us[offloads]
        at_once = ~offloads & (end_us == left_us[ops.stage, ops.microbatch])
        end_us = np.where(at_once, np.nextafter(end_us, np.inf), end_us)
        return memory_curve(start_us, end_us, Costs(self.problem, self.modes).host_effects(ops))

    @cached_property
    def _device_effects(self) -> Ints:
        return Costs(self.problem, self.modes).device_effects(self.ops)


def simulate(problem: Problem, orders: Orders) -> Simulation:
    """Time the orders under the rules of the model.

    Memory budgets are not enforced: read `device_memory` and `host_memory` of the result.
    Raises OrderError if an op is missing, repeated or misplaced, or not of its microbatch's mode, DeadlockError if ops
    wait in a cycle.
    """
    network = _Network(problem, orders)
    start, sequence = _earliest_starts(network.duration, *network.edges, np.zeros(network.size))
    if len(sequence) < network.size:
        raise _deadlock(network, sequence)
    if problem.objective == "device_span":
        start = _least_span(network, start)
    return Simulation(problem, network.ops, network.device, start, start + network.duration, orders.modes)


class UnitTimes:
    """Times of the same orders for other factors of their units: the precedence graph is built once.

    `problem` has no factors of its own. Times are whole nanoseconds, so that every machine computes the same. Raises as
    `simulate`.
    """

    def __init__(self, problem: Problem, orders: Orders) -> None:
        network = _Network(problem, orders)
        source, target, delay = network.edges
        _, sequence = _earliest_starts(network.duration, source, target, delay, np.zeros(network.size))
        if len(sequence) < network.size:
            raise _deadlock(network, sequence)
        self.size = network.size
        """Number of ops."""
        self._objective = problem.objective
        copies = (network.kind == O) | (network.kind == R)
        self._row = np.where(copies, 1, 0)  # of the factors: times, bytes, transfers
        self._unit, self._ns = network.microbatch, network.duration * 1000
        rank = np.empty(network.size, np.int64)
        rank[sequence] = np.arange(network.size)
        edges = np.argsort(rank[target], kind="stable")
        self._source, self._target, self._delay_ns = source[edges], target[edges], delay[edges] * 1000
        self._device = network.device

    def value_us(self, factors: Floats) -> float:
        """Makespan, or for `device_span` the largest span at the earliest starts.

        `factors`: rows of times, of bytes, and of transfers, each with an entry for every unit.
        """
        edges = self._source, self._target, self._delay_ns
        start, end = _spans_in_order(self._ns, self._row, self._unit, factors, *edges)
        if self._objective == "makespan":
            return float(end.max()) / 1000
        spans = [slice(*np.searchsorted(self._device, (d, d + 1)).tolist()) for d in np.unique(self._device)]
        return float(max(end[s].max() - start[s].min() for s in spans)) / 1000


@njit(cache=True)
def _spans_in_order(
    duration: Floats, row: Ints, unit: Ints, factors: Floats, source: Ints, target: Ints, delay: Floats
) -> tuple[Floats, Floats]:
    """Earliest start and end of each node, from edges in a topological order of their targets.

    A duration is multiplied by the factor in `row` of the node's unit, a delay by that in row 2 of its source's.
    """
    start, end = np.zeros(len(duration)), np.empty(len(duration))
    for k in range(len(duration)):
        end[k] = np.rint(duration[k] * factors[row[k], unit[k]])
    for e in range(len(source)):
        before, after = source[e], target[e]
        ready = start[before] + end[before]
        if delay[e] > 0:
            ready += np.rint(delay[e] * factors[2, unit[before]])
        start[after] = max(start[after], ready)
    return start, start + end


class _Network:
    """Precedence graph of orders: a node per op, and edges (source, target, delay) from every rule."""

    def __init__(self, problem: Problem, orders: Orders) -> None:
        self.problem = problem
        streams = [_columns(stream) for device in orders.devices for stream in device.streams()]
        self.ops = OpArray.joined([OpArray([], [], []), *streams])  # there may be no devices
        self.size = len(self.ops)
        self.lengths = [len(stream) for stream in streams]
        stream = np.repeat(np.arange(len(self.lengths)), self.lengths)
        self.follows = 1 + np.flatnonzero(stream[1:] == stream[:-1])
        self.device = stream // len(STREAMS)
        self.kind, self.stage, self.microbatch = self.ops.kind, self.ops.stage, self.ops.microbatch
        self._check_inside()
        self._check_permutation(orders.microbatch_order)
        self.at = self._positions(stream % len(STREAMS), orders.microbatch_order)
        self._check_modes(orders.modes)
        self.duration = Costs(problem, orders.modes).duration_us(self.ops)
        self.edges = self._edges(orders)

    def _check_inside(self) -> None:
        inside = self._inside(self.ops)
        if not inside.all():
            slices = f" of {self.problem.slice_count} slices" if self.problem.slice_count > 1 else ""
            size = f"{len(self.problem.stages)} stages and {self.problem.microbatches} microbatches{slices}"
            raise OrderError(f"{self.ops[int(np.argmin(inside))]} is not in a problem of {size}")

    def _inside(self, ops: OpArray) -> NDArray[np.bool_]:
        """Mask of the ops whose stage and microbatch exist in the problem."""
        stages = (ops.stage >= 0) & (ops.stage < len(self.problem.stages))
        return stages & (ops.microbatch >= 0) & (ops.microbatch < self.problem.units)

    def _check_permutation(self, microbatch_order: Sequence[int] | None) -> None:
        """Reject an order of the microbatches that is none, or that the problem does not leave free."""
        if microbatch_order is None:
            return
        ascending = list(range(self.problem.microbatches))
        if sorted(microbatch_order) != ascending:
            raise OrderError(f"microbatch_order does not hold each of {len(ascending)} microbatches once")
        if self.problem.microbatch_order == "given" and list(microbatch_order) != ascending:
            raise OrderError("microbatch_order is not ascending, but the problem's microbatch_order is 'given'")

    def _positions(self, stream: Ints, microbatch_order: Sequence[int] | None) -> Ints:
        """Node of each (kind, stage, unit), -1 if absent. Raises OrderError for a repeated or misplaced op."""
        home = np.asarray([s.device for s in self.problem.stages])[self.stage]
        own_stream = np.asarray(STREAM_OF_KIND)[self.kind]
        misplaced = (home != self.device) | (own_stream != stream)
        if misplaced.any():
            k = int(np.argmax(misplaced))
            where = f"device {self.device[k]}, stream {STREAMS[stream[k]]}"
            raise OrderError(f"{self.ops[k]} is on {where}, but belongs to device {home[k]}, {self.ops[k].stream}")
        at = np.full((len(KINDS), len(self.problem.stages), self.problem.units), -1, np.int64)
        at[self.kind, self.stage, self.microbatch] = np.arange(self.size)
        repeated = at[self.kind, self.stage, self.microbatch] != np.arange(self.size)
        if repeated.any():
            raise OrderError(f"{self.ops[int(np.argmax(repeated))]} is there more than once")
        self._check_complete(at >= 0)
        self._check_unit_order(at, microbatch_order)
        return at

    def _check_complete(self, present: NDArray[np.bool_]) -> None:
        def first(missing: NDArray[np.bool_], message: str) -> None:
            if missing.any():
                s, i = (int(x) for x in np.argwhere(missing)[0])
                raise OrderError(message.format(f"{s}.{i}"))

        fused = present[BW] | present[CBW]
        first(~present[F], "F{} is missing")
        first(~(present[B] | present[CB] | fused), "B{0} (or BW{0}) is missing")
        first(fused & (present[B] | present[W] | present[CB]), "BW{0} is there together with B{0} or W{0}")
        first(~fused & ~present[W], "W{} is missing")
        first((present[B] & present[CB]) | (present[BW] & present[CBW]), "two backwards of {0} are there")
        first(present[O] != present[R], "only one of O{0} and R{0} is there")
        for s, stage in enumerate(self.problem.stages):
            if not stage.split_backward and present[W, s].any():
                raise OrderError(
                    f"W{s}.{int(np.argmax(present[W, s]))} is there, but stages[{s}].split_backward is false"
                )

    def _check_modes(self, modes: Ints | None) -> None:
        """Reject an op that its microbatch's mode does not have, and a microbatch that lacks one."""
        present = self.at >= 0
        stages = self.problem.stages
        if modes is None:
            for s, stage in enumerate(stages):
                if stage.offload is None and present[O, s].any():
                    raise OrderError(f"O{s}.{int(np.argmax(present[O, s]))} is there, but stages[{s}].offload is null")
            recomputed = present[[C, CB, CBW]].any(axis=0)
            if recomputed.any():
                s, i = (int(x) for x in np.argwhere(recomputed)[0])
                raise OrderError(f"microbatch {i} is recomputed on stage {s}, but the orders have no modes")
            return
        counts = np.array([len(stage.choices) for stage in stages])[:, None]
        if modes.shape != present.shape[1:] or ((modes < 0) | (modes >= counts)).any():
            raise OrderError(f"modes must hold the number of a mode for each of {len(stages)} stages and microbatch")

        def of_modes(rule: Callable[[Mode], bool]) -> NDArray[np.bool_]:
            table = np.zeros((len(stages), counts.max()), bool)
            for s, stage in enumerate(stages):
                table[s, : len(stage.choices)] = [rule(mode) for mode in stage.choices]
            return table[np.arange(len(stages))[:, None], modes]

        inside = present[CB] | present[CBW]
        leaves = of_modes(lambda mode: mode.offload is not None)
        again = of_modes(lambda mode: mode.recomputes)
        by_segments = of_modes(lambda mode: mode.segment_bytes is not None)
        for wrong, detail in (
            (present[O] & ~leaves, "O{0} is there, but its mode {1!r} does not offload"),
            (leaves & ~present[O], "O{0} is missing: its mode {1!r} offloads"),
            ((present[C] | inside) & ~again, "{0} is recomputed, but its mode {1!r} keeps all"),
            (again & ~present[C] & ~inside, "{0} is in mode {1!r}, but neither C nor CB or CBW is there"),
            (present[C] & inside, "{0} is recomputed twice, by C and by CB or CBW"),
            (inside & ~by_segments, "CB or CBW of {0} is there, but its mode {1!r} has no segment_bytes"),
        ):
            if wrong.any():
                s, i = (int(x) for x in np.argwhere(wrong)[0])
                raise OrderError(detail.format(f"{s}.{i}", stages[s].choices[modes[s, i]].name))

    def _check_unit_order(self, at: Ints, microbatch_order: Sequence[int] | None) -> None:
        """Reject units out of order within one kind of op of one stage; BW counts as B, not as W."""
        ahead, back = (self.problem.units_in_order(kind, microbatch_order) for kind in "FB")
        units = at.shape[2]
        forwards, others = at[[F, O]][..., ahead].reshape(-1, units), at[[W, R, C]][..., back].reshape(-1, units)
        rows = np.concatenate([forwards, others, _backwards(at)[:, back]])
        latest = np.maximum.accumulate(rows, axis=1)[:, :-1]  # of those before that are present
        wrong = (rows[:, 1:] >= 0) & (rows[:, 1:] < latest)
        if wrong.any():
            row, place = np.argwhere(wrong)[0].tolist()
            early, late = self.ops[int(rows[row, place + 1])], self.ops[int(latest[row, place])]
            rule = "microbatches keep their order"
            if self.problem.slice_count > 1:
                rule += ", and slices run forward from the first and backward from the last,"
            raise OrderError(f"{early} comes before {late}, but {rule} within a stage")

    def _edges(self, orders: Orders) -> tuple[Ints, Ints, Floats]:
        parts = [*self._stream_edges(), *self._rule_edges(), *self._order_edges(orders)]
        source, target, delay = (np.concatenate([part[k].ravel() for part in parts]) for k in range(3))
        return source.astype(np.int64), target.astype(np.int64), delay.astype(np.float64)

    def _stream_edges(self) -> Iterator[tuple[Ints, Ints, Floats]]:
        """Each op after the previous op of its stream."""
        yield self.follows - 1, self.follows, np.zeros(len(self.follows))

    def _rule_edges(self) -> Iterator[tuple[Ints, Ints, Floats]]:
        at = self.at
        backward = _backwards(at)  # gives the gradient that the previous stage waits for
        delays = self.problem.unit_delays_us
        yield self._between(at[F][:-1], at[F][1:], delays["forward"])
        yield self._between(backward[1:], backward[:-1], delays["backward"])
        for before, after in (
            *((at[F], backward), (backward, at[W]), (at[F], at[O]), (at[O], at[R]), (at[R], backward)),
            *((at[F], at[C]), (at[R], at[C]), (at[C], backward)),
        ):
            yield self._between(before, after, 0.0)

    @staticmethod
    def _between(before: Ints, after: Ints, delay: Floats | float) -> tuple[Ints, Ints, Floats]:
        """Edges between nodes at equal positions of two arrays (stages, units), where both are present."""
        both = (before >= 0) & (after >= 0)
        return before[both], after[both], np.broadcast_to(delay, before.shape)[both]

    def _order_edges(self, orders: Orders) -> Iterator[tuple[Ints, Ints, Floats]]:
        """Edges of waits, and of the order of transfers on shared channels."""
        waits = orders.waits
        if not isinstance(waits, WaitArray):
            pairs = [(op, before) for op, others in waits.items() for before in others]
            waits = WaitArray(*(_columns([pair[side] for pair in pairs]) for side in range(2)))
        yield self._nodes(waits.before), self._nodes(waits.op), np.zeros(len(waits.op))
        for channel in orders.channels:
            nodes = self._nodes(channel)
            yield nodes[:-1], nodes[1:], np.zeros(len(nodes[1:]))

    def _nodes(self, ops: Sequence[Op]) -> Ints:
        named = _columns(ops)
        inside = self._inside(named)
        nodes = np.full(len(named), -1, np.int64)
        nodes[inside] = self.at[named.kind[inside], named.stage[inside], named.microbatch[inside]]
        if (nodes < 0).any():
            raise OrderError(f"a wait or a channel names {named[int(np.argmin(nodes))]}, which is in no stream")
        return nodes


def _backwards(at: Ints) -> Ints:
    """Node of the one backward other than W of each microbatch on each stage; -1 if absent."""
    nodes: Ints = at[[B, BW, CB, CBW]].max(axis=0)
    return nodes


def _columns(ops: Sequence[Op]) -> OpArray:
    try:
        return OpArray.of(ops)
    except KeyError as error:
        raise OrderError(f"an op has the kind {error}; the kinds are {', '.join(KINDS)}") from None


@njit(cache=True)
def _earliest_starts(
    duration: Floats, source: Ints, target: Ints, delay: Floats, release: Floats
) -> tuple[Floats, Ints]:
    """Earliest start of each node, and the nodes in topological order (incomplete if there is a cycle).

    No node starts before its `release`. Kahn's algorithm on the outgoing edges in compressed sparse row form.
    """
    size = len(duration)
    first_out = np.zeros(size + 1, np.int64)
    open_edges = np.zeros(size, np.int64)
    for e in range(len(source)):
        first_out[source[e] + 1] += 1
        open_edges[target[e]] += 1
    for k in range(size):
        first_out[k + 1] += first_out[k]
    next_slot = first_out[:-1].copy()
    out = np.empty(len(source), np.int64)
    for e in range(len(source)):
        out[next_slot[source[e]]] = e
        next_slot[source[e]] += 1
    start = release.copy()
    sequence = np.empty(size, np.int64)
    done = 0
    for k in range(size):
        if open_edges[k] == 0:
            sequence[done] = k
            done += 1
    head = 0
    while head < done:
        k = sequence[head]
        head += 1
        for slot in range(first_out[k], first_out[k + 1]):
            e = out[slot]
            ready = start[k] + duration[k] + delay[e]
            after = target[e]
            start[after] = max(start[after], ready)
            open_edges[after] -= 1
            if open_edges[after] == 0:
                sequence[done] = after
                done += 1
    return start, sequence[:done]


def _deadlock(network: _Network, sequence: Ints) -> DeadlockError:
    """Find a cycle: follow blocked predecessors backwards until one repeats."""
    blocked = np.ones(network.size, bool)
    blocked[sequence] = False
    source, target, _ = network.edges
    cause = np.full(network.size, -1, np.int64)
    inside = blocked[source] & blocked[target]
    cause[target[inside]] = source[inside]
    path: dict[int, int] = {}
    node = int(np.argmax(blocked))
    while node not in path:
        path[node] = len(path)
        node = int(cause[node])
    cycle = list(path)[path[node] :][::-1]
    return DeadlockError([str(network.ops[k]) for k in cycle], int(blocked.sum()))


def _least_span(network: _Network, start: Floats) -> Floats:
    """Start times of the same orders that minimise the largest device span."""
    ends = np.cumsum(network.lengths)
    compute = [(e - n, e - 1) for n, e in zip(network.lengths, ends, strict=True)][:: len(STREAMS)]
    first, last = np.array([pair for pair in compute if pair[0] <= pair[1]], np.int64).T

    def earliest(release: Floats) -> Floats:
        result: Floats = _earliest_starts(network.duration, *network.edges, release)[0]
        return result

    return least_span_starts(earliest, network.duration, first, last, start)


NEVER = -1e300
"""Release time of all nodes but the source of a longest-path search."""


def least_span_starts(
    earliest: Callable[[Floats], Floats], duration: Floats, first: Ints, last: Ints, start: Floats
) -> Floats:
    """Start times (us) that minimise the largest span over devices.

    `earliest` maps release times to earliest starts; `first[d]` and `last[d]` are the first and last node of device d,
    `start` the earliest starts without releases.
    """
    if (start[last] + duration[last] - start[first]).max() <= _longest_own_path(earliest, duration, first, last, start):
        return start
    paths = np.empty((len(first), len(first)))
    for d, node in enumerate(first):
        release = np.full(len(duration), NEVER)
        release[node] = 0.0
        paths[d] = earliest(release)[last] + duration[last]
    return _starts_within(largest_cycle_mean(paths), earliest, duration, first, last, start)


def _longest_own_path(
    earliest: Callable[[Floats], Floats], duration: Floats, first: Ints, last: Ints, start: Floats
) -> float:
    """Lower bound on the largest span: the longest path within the device whose span is largest at earliest starts."""
    worst = int(np.argmax(start[last] + duration[last] - start[first]))
    release = np.full(len(duration), NEVER)
    release[first[worst]] = 0.0
    return float(earliest(release)[last[worst]] + duration[last[worst]])


def _starts_within(
    span: float, earliest: Callable[[Floats], Floats], duration: Floats, first: Ints, last: Ints, start: Floats
) -> Floats:
    """Earliest starts that keep every span within `span`, which is feasible up to rounding."""
    release = np.zeros(len(duration))
    best = start
    for _ in range(len(first) + 1):
        latest_needed = np.maximum(release[first], start[last] + duration[last] - span)
        if np.allclose(latest_needed, np.maximum(release[first], start[first]), rtol=0, atol=1e-9 * span):
            break
        release[first] = np.maximum(latest_needed, start[first])
        start = earliest(release)
        best = min(best, start, key=lambda s: float((s[last] + duration[last] - s[first]).max()))
    return best


def largest_cycle_mean(lengths: Floats) -> float:
    """Maximum cycle mean of the complete graph with edge lengths `lengths[d, e]` (Karp 1978)."""
    size = len(lengths)
    walks = np.empty((size + 1, size))
    walks[0] = np.where(np.arange(size) == 0, 0.0, -np.inf)
    for k in range(size):
        walks[k + 1] = (walks[k][:, None] + lengths).max(axis=0)
    steps = size - np.arange(size)
    with np.errstate(invalid="ignore"):
        means = (walks[size][None, :] - walks[:size]) / steps[:, None]
    return float(np.nanmin(np.where(np.isnan(means), np.inf, means), axis=0).max())
