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

from optpipe.costs import FACTOR_OF_TIME
from optpipe.errors import DeadlockError, OrderError
from optpipe.kinds import (
    CODE,
    COPIES,
    DOERS,
    DUTIES,
    GATED,
    HALVES,
    KIND,
    KINDS,
    PRECEDENCES,
    RECOMPUTATIONS,
    ROWS,
    SEQUENCES,
    STREAMS,
    codes,
    covering,
)
from optpipe.memory import Curve, memory_curve
from optpipe.mode_names import KEPT
from optpipe.ops import Op, OpArray, Orders, WaitArray
from optpipe.problem import Problem
from optpipe.stage import UnitFactors
from optpipe.task_graph import lower

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
        copies = np.flatnonzero(np.isin(self.ops.kind, codes(COPIES)))
        ops, start_us, end_us = self.ops[copies], self.start_us[copies], self.end_us[copies]
        left_us = np.full((len(self.problem.stages), self.problem.units), np.nan)
        effects = self._effects(lower(self.problem).host_bytes, ops)
        offloads = ops.kind == CODE["O"]
        left_us[ops.stage[offloads], ops.microbatch[offloads]] = start_us[offloads]
        at_once = ~offloads & (end_us == left_us[ops.stage, ops.microbatch])
        end_us = np.where(at_once, np.nextafter(end_us, np.inf), end_us)
        return memory_curve(start_us, end_us, effects)

    @cached_property
    def _device_effects(self) -> Ints:
        return self._effects(lower(self.problem).device_bytes, self.ops)

    def _effects(self, of_types: Ints, ops: OpArray) -> Ints:
        return of_types[lower(self.problem).types(ops, self.modes)]


def simulate(problem: Problem, orders: Orders) -> Simulation:
    """Time the orders under the rules of the model.

    Memory budgets are not enforced: read `device_memory` and `host_memory` of the result.
    Raises OrderError if an op is missing, repeated or misplaced, or not of its microbatch's mode, DeadlockError if ops
    wait in a cycle.
    """
    network = _Network(problem, orders)
    start, sequence = _earliest_starts(network.node_us, *network.edges, np.zeros(network.nodes))
    if len(sequence) < network.nodes:
        raise _deadlock(network, sequence)
    if problem.objective == "device_span":
        start = _least_span(network, start)
    start = start[network.whole[: network.size]]
    return Simulation(problem, network.ops, network.device, start, start + network.duration, orders.modes)


class UnitTimes:
    """Times of the same orders for other factors of their units: the precedence graph is built once.

    `problem` has no factors of its own. Times are whole nanoseconds, so that every machine computes the same. Raises as
    `simulate`.
    """

    def __init__(self, problem: Problem, orders: Orders) -> None:
        network = _Network(problem, orders)
        source, target, delay = network.edges
        _, sequence = _earliest_starts(network.node_us, source, target, delay, np.zeros(network.nodes))
        if len(sequence) < network.nodes:
            raise _deadlock(network, sequence)
        self.size = network.size
        """Number of ops."""
        self._objective = problem.objective
        barriers = np.tile(np.arange(problem.units), len(problem.pass_names))
        self._unit = np.concatenate([network.ops.microbatch, barriers])
        self._parts_ns = _parts_us(network) * 1000
        rank = np.empty(network.nodes, np.int64)
        rank[sequence] = np.arange(network.nodes)
        edges = np.argsort(rank[target], kind="stable")
        self._source, self._target, self._delay_ns = source[edges], target[edges], delay[edges] * 1000
        self._device = network.device

    def work_us(self, factors: Floats) -> Floats:
        """Time that all ops would take for the factors of each unit, if every unit had them: an array over units."""
        return np.asarray(self._parts_ns.sum(axis=1) @ factors / 1000)

    def value_us(self, factors: Floats) -> float:
        """Makespan, or for `device_span` the largest span at the earliest starts.

        `factors`: a row for each field of `UnitFactors`, with an entry for every unit.
        """
        edges = self._source, self._target, self._delay_ns
        start, end = _spans_in_order(self._parts_ns, self._unit, factors, *edges)
        if self._objective == "makespan":
            return float(end.max()) / 1000
        spans = [slice(*np.searchsorted(self._device, (d, d + 1)).tolist()) for d in np.unique(self._device)]
        return float(max(end[s].max() - start[s].min() for s in spans)) / 1000


@njit(cache=True)
def _spans_in_order(
    parts: Floats, unit: Ints, factors: Floats, source: Ints, target: Ints, delay: Floats
) -> tuple[Floats, Floats]:
    """Earliest start and end of each node, from edges in a topological order of their targets.

    Row r of `parts` is multiplied by row r of the factors of each node's unit, a delay by the last of its source's.
    """
    rows, size = parts.shape
    start, end = np.zeros(size), np.zeros(size)
    for k in range(size):
        for r in range(rows):
            end[k] += parts[r, k] * factors[r, unit[k]]
        end[k] = np.rint(end[k])
    for e in range(len(source)):
        before, after = source[e], target[e]
        ready = start[before] + end[before]
        if delay[e] > 0:
            ready += np.rint(delay[e] * factors[rows - 1, unit[before]])
        start[after] = max(start[after], ready)
    return start, start + end


def _parts_us(network: _Network) -> Floats:
    """Parts of the durations of nodes by the factor that each is multiplied with: an array (factors, nodes)."""
    parts = np.zeros((len(UnitFactors._fields), network.nodes))
    spread = np.flatnonzero(network.ops.spread)
    parts[UnitFactors._fields.index("time"), spread] = network.duration[spread]
    for code, row in enumerate(ROWS):
        ops = np.flatnonzero(network.ops.kind == code)
        for name in row.times:
            of_types = network.graph.times_us[name].ravel()
            parts[UnitFactors._fields.index(FACTOR_OF_TIME[name]), ops] += of_types[network.types[ops] % of_types.size]
    return parts


_FIELD_OF_TIME = {
    "offload": "offload", "reload": "offload", "recompute": "recompute_us", "recompute_inside": "segment_bytes"
}  # fmt: skip
"""The field of a mode without which it has no ops of that time."""


class _Network:
    """Precedence graph of orders: a node per op, and edges (source, target, delay) from every rule.

    Behind the nodes of ops is one without length for each barrier: the latest end of a spread pass for a microbatch.
    """

    def __init__(self, problem: Problem, orders: Orders) -> None:
        self.problem, self.graph = problem, lower(problem)
        streams = [self._columns(stream) for device in orders.devices for stream in device.streams()]
        self.ops = OpArray.joined([self._columns(()), *streams])  # there may be no devices
        self.size = len(self.ops)
        self.nodes = self.size + len(problem.pass_names) * problem.units
        self.lengths = [len(stream) for stream in streams]
        stream = np.repeat(np.arange(len(self.lengths)), self.lengths)
        self.follows = 1 + np.flatnonzero(stream[1:] == stream[:-1])
        self.device = stream // len(STREAMS)
        self._check_inside()
        self._check_permutation(orders.microbatch_order)
        self._there = {*np.flatnonzero(np.bincount(self.ops.kind)).tolist()}
        self._nodes_by_kinds: dict[tuple[int, ...], Ints] = {}
        self._at = self._positions(stream % len(STREAMS))
        self._check_modes(orders.modes)
        self.types = self.graph.types(self.ops, orders.modes)
        self.duration = self.graph.duration_us[self.types]
        self._check_duties(orders.modes)
        self._check_unit_order(orders.microbatch_order)
        self.whole = self._join(orders)
        source, target, delay = self._edges(orders)
        inner = self.whole[source] != self.whole[target]
        self.edges = self.whole[source[inner]], self.whole[target[inner]], delay[inner]

    @property
    def node_us(self) -> Floats:
        """Duration of each node."""
        return np.concatenate([self.duration, np.zeros(self.nodes - self.size)])

    def name(self, node: int) -> str:
        """Name of an op, or of a barrier."""
        if node < self.size:
            return str(self.ops[node])
        number, unit = divmod(node - self.size, self.problem.units)
        return f"all {self.problem.pass_names[number]} of microbatch {unit}"

    def _check_inside(self) -> None:
        inside = self._inside(self.ops)
        if not inside.all():
            slices = f" of {self.problem.slice_count} slices" if self.problem.slice_count > 1 else ""
            size = f"{len(self.problem.stages)} stages and {self.problem.microbatches} microbatches{slices}"
            raise OrderError(f"{self.ops[int(np.argmin(inside))]} is not in a problem of {size}")

    def _columns(self, ops: Sequence[Op]) -> OpArray:
        """Ops as columns, with the problem's passes behind the kinds."""
        try:
            return OpArray.of(ops).numbered(self.problem.pass_names)
        except KeyError as error:
            kinds = ", ".join((*KINDS, *self.problem.pass_names))
            raise OrderError(f"an op has the kind {error}; the kinds are {kinds}") from None

    def _inside(self, ops: OpArray) -> NDArray[np.bool_]:
        """Mask of the ops whose stage, or device of a pass, and microbatch exist in the problem."""
        places = np.where(ops.spread, len(self.problem.devices), len(self.problem.stages))
        return (ops.stage >= 0) & (ops.stage < places) & (ops.microbatch >= 0) & (ops.microbatch < self.problem.units)

    def _check_permutation(self, microbatch_order: Sequence[int] | None) -> None:
        """Reject an order of the microbatches that is none, or that the problem does not leave free."""
        if microbatch_order is None:
            return
        ascending = list(range(self.problem.microbatches))
        if sorted(microbatch_order) != ascending:
            raise OrderError(f"microbatch_order does not hold each of {len(ascending)} microbatches once")
        if self.problem.microbatch_order == "given" and list(microbatch_order) != ascending:
            raise OrderError("microbatch_order is not ascending, but the problem's microbatch_order is 'given'")

    def _positions(self, stream: Ints) -> Ints:
        """Node of each (kind, place, unit), -1 if absent. Raises OrderError for a repeated or misplaced op.

        A place is a stage, or for passes a device.
        """
        ops, nodes = self.ops, np.arange(self.size)
        home, own_stream = self.graph.device_of(ops), ops.stream
        misplaced = (home != self.device) | (own_stream != stream)
        if misplaced.any():
            k = int(np.argmax(misplaced))
            where = f"device {self.device[k]}, stream {STREAMS[stream[k]]}"
            raise OrderError(f"{ops[k]} is on {where}, but belongs to device {home[k]}, {ops[k].stream}")
        passes = len(self.problem.pass_names)
        places = max(len(self.problem.stages), len(self.problem.devices) if passes else 0)
        at = np.full((len(KINDS) + passes, places, self.problem.units), -1, np.int64)
        at[ops.kind, ops.stage, ops.microbatch] = nodes
        repeated = at[ops.kind, ops.stage, ops.microbatch] != nodes
        if repeated.any():
            raise OrderError(f"{ops[int(np.argmax(repeated))]} is there more than once")
        return at

    @property
    def at(self) -> Ints:
        """Node of each (kind, stage, unit), -1 if absent."""
        of_stages: Ints = self._at[: len(KINDS), : len(self.problem.stages)]
        return of_stages

    @property
    def spread(self) -> Ints:
        """Node of each (pass, device, unit), -1 if absent."""
        of_devices: Ints = self._at[len(KINDS) :, : len(self.problem.devices)]
        return of_devices

    def _check_modes(self, modes: Ints | None) -> None:
        """Reject modes of another shape, or of numbers that a stage does not have."""
        counts = self.graph.options[:, None]
        if modes is not None and (modes.shape != self.at.shape[1:] or ((modes < 0) | (modes >= counts)).any()):
            raise OrderError(f"modes must hold the number of a mode for each of {len(counts)} stages and microbatch")

    def _check_duties(self, modes: Ints | None) -> None:
        """Reject an op that its microbatch's mode does not have, and a duty of one that no op does, or that two do."""
        present, stages = self.at >= 0, self.problem.stages
        options = modes if modes is not None else np.zeros((len(stages), 1), np.int64)
        if modes is None and not self._there.isdisjoint(codes(COPIES)):
            options = np.where(present[[*codes(COPIES)]].any(axis=0), self.graph.whole_option[:, None], 0)
        absent = np.isnan(self.duration)
        if absent.any():
            op = self.ops[int(np.argmax(absent))]
            if op.kind in self.problem.pass_names:
                raise OrderError(f"{op} is there, but spread pass {op.kind} takes no time on device {op.stage}")
            if stages[op.stage].backward == "none":
                raise OrderError(f"{op} is there, but stages[{op.stage}].backward is 'none'")
            mode = self._mode_name(op.stage, op.microbatch, options)
            field = next(_FIELD_OF_TIME[time] for time in KIND[op.kind].times if time in _FIELD_OF_TIME)
            maybe = ". Maybe the orders lack their modes" if modes is None and op.kind in RECOMPUTATIONS else ""
            raise OrderError(f"{op} is there, but its mode {mode!r} has no {field}{maybe}")
        for s in [s for s, stage in enumerate(stages) if not stage.split_backward]:
            halves = np.argwhere(present[[*codes(HALVES)], s])
            if len(halves):
                half, i = halves[0].tolist()
                raise OrderError(f"{HALVES[half]}{s}.{i} is there, but stages[{s}].split_backward is false")
        for duty, doers in DOERS.items():
            there, needed = [kind for kind in doers if kind in self._there], self.graph.duties[duty]
            if not there and not needed.any():
                continue
            done = present[there].sum(axis=0) if len(there) != 1 else present[there[0]]
            wrong = done != np.take_along_axis(needed, options, 1)
            if wrong.any():
                s, i = np.argwhere(wrong)[0].tolist()
                raise self._wrong_duty(duty, s, i, options)
        for one, nodes in zip(self.graph.passes, self.spread, strict=True):
            missing = (nodes < 0) & ~np.isnan(one.duration_us[:, :1])
            if missing.any():
                d, i = np.argwhere(missing)[0].tolist()
                raise OrderError(f"{one.name}{d}.{i} is missing: every device with a time for {one.name} has one")

    def _mode_name(self, s: int, i: int, options: Ints) -> str:
        option = int(np.broadcast_to(options, self.at.shape[1:])[s, i])
        return self.problem.stages[s].choices[option].name

    def _wrong_duty(self, duty: str, s: int, i: int, options: Ints) -> OrderError:
        nodes = self.at[:, s, i]
        there = [f"{kind}{s}.{i}" for kind in covering(duty) if nodes[CODE[kind]] >= 0]
        if there:
            return OrderError(f"{there[1]} is there together with {there[0]}: both do {duty}")
        mode, undone = self._mode_name(s, i, options), {duty for duty in DUTIES if (nodes[[*DOERS[duty]]] < 0).all()}
        first, *others = [f"{kind}{s}.{i}" for kind in covering(duty) if {*KIND[kind].duties} <= undone]
        or_others = f" (or {' or '.join(others)})" if others else ""
        of_mode = "" if mode == KEPT else f": its mode is {mode!r}"
        return OrderError(f"{first}{or_others} is missing{of_mode}")

    def _check_unit_order(self, microbatch_order: Sequence[int] | None) -> None:
        """Reject units out of order within one sequence of a stage: of the kinds with one leading duty."""
        parts = []
        for first in ("F", "B"):  # duties in the order of forwards, then those in the order of backwards
            units = self.problem.units_in_order(first, microbatch_order)
            kinds = [alike for duty, alike in SEQUENCES.items() if KIND[duty].ascends == KIND[first].ascends]
            nodes = [self._nodes_of(alike) for alike in kinds if not self._there.isdisjoint(alike)]
            parts += [rows[:, units] for rows in nodes]
        parts += [rows[:, self.problem.units_in_order("F", microbatch_order)] for rows in self.spread]
        rows = np.concatenate(parts)
        latest = np.maximum.accumulate(rows, axis=1)[:, :-1]  # of those before that are present
        wrong = (rows[:, 1:] >= 0) & (rows[:, 1:] < latest)
        if wrong.any():
            row, place = np.argwhere(wrong)[0].tolist()
            early, late = self.ops[int(rows[row, place + 1])], self.ops[int(latest[row, place])]
            rule = "microbatches keep their order"
            if self.problem.slice_count > 1:
                rule += ", and slices run forward from the first and backward from the last,"
            raise OrderError(f"{early} comes before {late}, but {rule} within a stage")

    def _join(self, orders: Orders) -> Ints:
        """The node that stands for each node: the F of a block for both of its ops. Sets the duration of both.

        Raises OrderError for two ops that may not be a block.
        """
        whole = np.arange(self.nodes)
        for forward, backward in orders.blocks.items():
            time_us = self.problem.block_of_units_us(forward, backward)
            first, last = self._nodes([forward, backward]).tolist()
            if time_us is None or last != first + 1 or self.device[first] != self.device[last]:
                why = "no overlap of the problem" if time_us is None else "not right behind each other"
                raise OrderError(f"{forward} and {backward} are one block, but {why}")
            if whole[first] != first or whole[last] != last:
                raise OrderError(f"{forward} and {backward} are one block, but one of them is of another")
            whole[last] = first
            self.duration[[first, last]] = time_us
        return whole

    def _edges(self, orders: Orders) -> tuple[Ints, Ints, Floats]:
        parts = [*self._stream_edges(), *self._rule_edges(), *self._spread_edges(), *self._order_edges(orders)]
        source, target, delay = (np.concatenate([part[k].ravel() for part in parts]) for k in range(3))
        return source.astype(np.int64), target.astype(np.int64), delay.astype(np.float64)

    def _stream_edges(self) -> Iterator[tuple[Ints, Ints, Floats]]:
        """Each op after the previous op of its stream."""
        yield self.follows - 1, self.follows, np.zeros(len(self.follows))

    def _rule_edges(self) -> Iterator[tuple[Ints, Ints, Floats]]:
        for need, before, after in PRECEDENCES:
            if self._there.isdisjoint(before) or self._there.isdisjoint(after):
                continue
            first, then, delay = self._nodes_of(before), self._nodes_of(after), np.zeros(1)
            if need.direction is not None:
                behind, ahead = slice(None, -1), slice(1, None)
                first, then = (first[behind], then[ahead]) if need.stage < 0 else (first[ahead], then[behind])
                delay = self.graph.delays_us[need.direction]
            yield self._between(first, then, delay)

    def _spread_edges(self) -> Iterator[tuple[Ints, Ints, Floats]]:
        """Each barrier after the ops of its pass, and what comes after barriers and ops, passes and gated ops."""
        barriers = np.arange(self.size, self.nodes).reshape(len(self.spread), self.problem.units)
        for nodes, barrier in zip(self.spread, barriers, strict=True):
            yield self._between(nodes, np.broadcast_to(barrier, nodes.shape), np.zeros(1))
        devices = np.arange(len(self.problem.devices))
        after = [
            (lag, nodes, devices)
            for one, nodes in zip(self.graph.passes, self.spread, strict=True)
            for lag in one.after
        ]
        for (duty, s), lags in self.graph.gates.items():
            if not self._there.isdisjoint(GATED[duty]):
                after += [(lag, self._nodes_of(GATED[duty])[[s]], self.graph.device[[s]]) for lag in lags]
        for lag, nodes, homes in after:
            if lag.spread is not None:
                first, delay = barriers[lag.spread], lag.us
            else:
                first, sent = self._nodes_of(DOERS[lag.duty])[lag.stage], homes != self.graph.device[lag.stage]
                delay = sent[:, None] * lag.us
            yield self._between(np.broadcast_to(first, nodes.shape), nodes, delay)

    def _nodes_of(self, kinds: Sequence[int]) -> Ints:
        """Node of the one op of these kinds of each unit on each stage; -1 if absent."""
        there = tuple(kind for kind in kinds if kind in self._there)
        if there not in self._nodes_by_kinds:
            self._nodes_by_kinds[there] = self.at[[*there]].max(axis=0) if len(there) > 1 else self.at[there[0]]
        return self._nodes_by_kinds[there]

    @staticmethod
    def _between(before: Ints, after: Ints, delay: Floats) -> tuple[Ints, Ints, Floats]:
        """Edges between nodes at equal positions of two arrays (stages, units), where both are present."""
        both = (before >= 0) & (after >= 0)
        return before[both], after[both], np.broadcast_to(delay, before.shape)[both]

    def _order_edges(self, orders: Orders) -> Iterator[tuple[Ints, Ints, Floats]]:
        """Edges of waits, and of the order of transfers on shared channels."""
        waits = orders.waits
        if not isinstance(waits, WaitArray):
            pairs = [(op, before) for op, others in waits.items() for before in others]
            waits = WaitArray(*(self._columns([pair[side] for pair in pairs]) for side in range(2)))
        yield self._nodes(waits.before), self._nodes(waits.op), np.zeros(len(waits.op))
        for channel in orders.channels:
            nodes = self._nodes(channel)
            yield nodes[:-1], nodes[1:], np.zeros(len(nodes[1:]))

    def _nodes(self, ops: Sequence[Op]) -> Ints:
        named = self._columns(ops)
        inside = self._inside(named)
        nodes = np.full(len(named), -1, np.int64)
        nodes[inside] = self._at[named.kind[inside], named.stage[inside], named.microbatch[inside]]
        if (nodes < 0).any():
            raise OrderError(f"a wait or a channel names {named[int(np.argmin(nodes))]}, which is in no stream")
        return nodes


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
    blocked = np.ones(network.nodes, bool)
    blocked[sequence] = False
    source, target, _ = network.edges
    cause = np.full(network.nodes, -1, np.int64)
    inside = blocked[source] & blocked[target]
    cause[target[inside]] = source[inside]
    path: dict[int, int] = {}
    node = int(np.argmax(blocked))
    while node not in path:
        path[node] = len(path)
        node = int(cause[node])
    cycle = list(path)[path[node] :][::-1]
    return DeadlockError([network.name(k) for k in cycle], int(blocked[: network.size].sum()))


def _least_span(network: _Network, start: Floats) -> Floats:
    """Start times of the same orders that minimise the largest device span."""
    ends = np.cumsum(network.lengths)
    compute = [(e - n, e - 1) for n, e in zip(network.lengths, ends, strict=True)][:: len(STREAMS)]
    first, last = network.whole[np.array([pair for pair in compute if pair[0] <= pair[1]], np.int64).T]

    def earliest(release: Floats) -> Floats:
        result: Floats = _earliest_starts(network.node_us, *network.edges, release)[0]
        return result

    return least_span_starts(earliest, network.node_us, first, last, start)


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
