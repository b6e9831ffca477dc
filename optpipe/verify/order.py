"""Rules of order: what ops wait for, one copy at a time on a channel, no cycles; exact times, and causes of starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from optpipe.errors import cycle_text
from optpipe.kinds import KINDS
from optpipe.ops import OpArray
from optpipe.spread import AfterOp, AfterPass
from optpipe.units import time_text
from optpipe.verify.columns import RELATIVE_TOLERANCE, ScheduledOps, among, codes_of, span
from optpipe.worst_case_memory import (
    slice_factor,
)

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Causes:
    """Causes of the starts of ops; these are numbered as the document lists them: by device, then by stream.

    Op `needs[0][k]` needs the end of op `needs[1][k]`, by a rule or a wait. Of all that an op has to follow, also on
    its stream and its channel, `starts_after` was met last, `delay_us` before its start; -1 where it starts later.
    """

    ops: OpArray
    needs: tuple[Ints, Ints]
    starts_after: Ints
    delay_us: Floats
    critical_path: Sequence[int]
    """Chain of ops that each start after the one before, up to the one whose end sets the objective's value."""


class OrderedOps(ScheduledOps):
    """Ops with their precedences, by rules, streams, waits and channels."""

    def _check_dependencies(self) -> None:
        start_us, end_us = (np.concatenate([column, self._barrier_us]) for column in (self.start_us, self.end_us))
        for op, before, delay_us in self._dependencies:
            ready = end_us[before] + delay_us
            for k in np.flatnonzero(start_us[op] < ready - self.tolerance).tolist():
                early = time_text(ready[k] - start_us[op[k]])
                detail = f"starts {early} before {self._name(int(before[k]))} lets it."
                self._broken("dependency", str(self.ops[int(op[k])]), float(self.start_us[op[k]]), detail)

    @cached_property
    def _barrier_us(self) -> Floats:
        """Latest end of each spread pass for each microbatch: the time of a node behind those of the ops."""
        latest_us = np.full((len(self._passes), self.problem.units), self.start_us.min(initial=0.0))
        passes = np.flatnonzero(self.spread)
        number, microbatch = self.ops.kind[passes] - len(KINDS), self.ops.microbatch[passes]
        np.maximum.at(latest_us, (number, microbatch), self.end_us[passes])
        return latest_us.ravel()

    def _name(self, node: int) -> str:
        """Name of an op, or of a barrier."""
        if node < len(self.key):
            return str(self.ops[node])
        number, unit = divmod(node - len(self.key), self.problem.units)
        return f"the last {[*self._passes][number]} of microbatch {unit}"

    @cached_property
    def _dependencies(self) -> Sequence[tuple[Ints, Ints, Floats]]:
        """Precedences by the rules of the model: indices of ops and of their predecessors, and the delays."""
        edges = []
        for op, before, delay_us in (*self._rules(), *self._spread_rules()):
            present = before >= 0
            edges.append((op[present], before[present], np.broadcast_to(delay_us, present.shape)[present]))
        return edges

    def _rules(self) -> Iterator[tuple[Ints, Ints, Floats | float]]:
        """The precedences of each rule, with -1 for a predecessor that is not in the schedule."""
        stage, last = self.ops.stage, len(self.problem.stages) - 1
        f, b, w, bw, o, r, c, cb, cbw = (self.ops.kind == code for code in range(len(KINDS)))  # no spread pass
        backward = b | bw | cb | cbw
        op = np.flatnonzero(f & (stage > 0))
        yield op, self._relative(op, "F", -1), self._delays_us(op, -1)
        op = np.flatnonzero(backward & (stage < last))
        gradient = self._relative(op, "B", 1)
        for kind in [kind for kind, there in (("BW", bw), ("CB", cb), ("CBW", cbw)) if there.any()]:
            gradient = np.where(gradient >= 0, gradient, self._relative(op, kind, 1))
        yield op, gradient, self._delays_us(op, 1)
        rules = [(backward, "F"), (backward, "R"), (w, "B"), (o, "F"), (r, "O")]
        if c.any() or cb.any():
            rules += [(backward, "C"), (c, "F"), (c, "R"), (w, "CB")]
        for mask, earlier in rules:
            op = np.flatnonzero(mask)
            yield op, self._relative(op, earlier, 0), 0.0

    def _spread_rules(self) -> Iterator[tuple[Ints, Ints, Floats | float]]:
        """Each barrier after every op of its pass, and what passes and gated ops come after."""
        for n, one in enumerate(self._passes.values()):
            op = np.flatnonzero(self.ops.kind == len(KINDS) + n)
            yield self._barrier(n, self.ops.microbatch[op]), op, 0.0
            yield from (self._after(op, after) for after in one.after)
        for gate in self.problem.gates or ():
            kinds = _DOING.get(gate.op, (gate.op,))  # an op that is not in the schedule waits for nothing
            op = np.flatnonzero(among(self.ops.kind, *kinds) & (self.ops.stage == gate.stage))
            yield from (self._after(op, after) for after in gate.after)

    def _barrier(self, number: int | Ints, microbatch: Ints) -> Ints:
        """Node of a pass for each of these microbatches."""
        return len(self.key) + number * self.problem.units + microbatch

    def _after(self, op: Ints, after: AfterOp | AfterPass) -> tuple[Ints, Ints, Floats]:
        """Ops, the node that each comes after, and the time between them: none for an op on the same device."""
        microbatch = self.ops.microbatch[op]
        us = after.us * np.array([sort.transfer for sort in self.sorts])[self.unit_sort[microbatch]]
        if isinstance(after, AfterPass):
            return op, self._barrier([*self._passes].index(after.pass_name), microbatch), us
        before = np.full(len(op), -1)
        for code in codes_of(*_DOING[after.op]):
            found = self._find(self._keys(np.full(len(op), code), np.full(len(op), after.stage), microbatch))
            before = np.where(found >= 0, found, before)
        return op, before, us * (self.home[op] != self.problem.stages[after.stage].device)

    def _delays_us(self, op: Ints, step: int) -> Floats:
        """Time of the transfer of what each op needs from the stage `step` further, by the factors of that stage."""
        stage, unit_sort = self.ops.stage[op], self.unit_sort[self.ops.microbatch[op]]
        if step < 0:
            delay_us = np.array([0.0, *self.problem.forward_delay_us])
        else:
            delay_us = np.array([*self.problem.backward_delay_us, 0.0])
        if self.problem.slices is None and self.problem.microbatch_factors is None:
            return delay_us[stage]
        factors = [
            [sort.transfer * slice_factor(self.problem, s, "transfer", sort.slice) for sort in self.sorts]
            for s in range(len(self.problem.stages))
        ]
        return np.asarray(delay_us[stage] * np.array(factors)[stage + step, unit_sort])

    def _relative(self, op: Ints, kind: str, step: int) -> Ints:
        """Indices of the ops of `kind` for the same microbatches, `step` stages after the stages of `op`."""
        code = np.full(len(op), KINDS.index(kind))
        return self._find(self._keys(code, self.ops.stage[op] + step, self.ops.microbatch[op]))

    def _check_waits(self) -> None:
        """Each wait names an op on another stream of the same device, and that op ends first."""
        op, before, names = self._waits
        absent = before < 0
        stream = self._stream_of_kind[self.ops.kind]
        elsewhere = (self.home[before] != self.home[op]) | (stream[before] == stream[op])
        early = self.start_us[op] < self.end_us[before] - self.tolerance
        for wait in np.flatnonzero(absent | elsewhere | early).tolist():
            k, name = int(op[wait]), names[wait]
            if absent[wait]:
                self._wait_broken(k, f"waits for {name}, which is not in the schedule.")
            elif elsewhere[wait]:
                self._wait_broken(k, f"waits for {name}, not on another stream of its device.")
            else:
                lead = time_text(self.end_us[before[wait]] - self.start_us[k])
                self._wait_broken(k, f"starts {lead} before {name}, which it waits for, ends.")

    @cached_property
    def _waits(self) -> tuple[Ints, Ints, Sequence[str]]:
        """Waits as columns: index of the op, index of the op it waits for or -1, and the name of that."""
        waiting: list[int] = []
        names: list[str] = []
        for first, stream in zip(self.begins.tolist(), self.streams, strict=False):
            for index, others_of_op in stream.waits.items():
                waiting += [first + index] * len(others_of_op)
                names += others_of_op
        others = OpArray.parse(" ".join(names)).numbered([*self._passes])
        places = np.where(others.kind < len(KINDS), len(self.problem.stages), len(self.problem.devices))
        known = (others.stage < places) & (others.microbatch < self.problem.units)
        # Outside the problem a key would be that of another op.
        indices = np.where(known, self._find(self._keys(others.kind, others.stage, others.microbatch)), -1)
        return np.array(waiting, np.int64), indices, names

    def _wait_broken(self, k: int, detail: str) -> None:
        self._broken("wait", str(self.ops[k]), float(self.start_us[k]), detail)

    def _check_channels(self) -> None:
        """One transfer at a time on a channel, including channels that devices or directions share."""
        copies, channel = self._copies
        order = np.lexsort((self.end_us[copies], self.start_us[copies], channel))
        copies, channel = copies[order], channel[order]
        overlap = self.start_us[copies[1:]] < self.end_us[copies[:-1]] - self.tolerance
        for k in np.flatnonzero(overlap & (channel[1:] == channel[:-1])).tolist():
            op, before = int(copies[k + 1]), self.ops[int(copies[k])]
            detail = f"overlaps {before} on a shared channel."
            self._broken("channel", str(self.ops[op]), float(self.start_us[op]), detail)

    def _channel_pairs(self, rank: Floats | Ints) -> tuple[Ints, Ints]:
        """Copies and their predecessors on the same channel, when each channel runs its copies by `rank`."""
        copies, channel = self._copies
        order = np.lexsort((rank[copies], channel))
        copies, channel = copies[order], channel[order]
        same = channel[1:] == channel[:-1]
        return copies[1:][same], copies[:-1][same]

    def _check_cycles(self) -> None:
        """No cycle of ops by rules, streams and waits."""
        op, before, _ = self._edges
        start_us = np.concatenate([self.start_us, self._barrier_us])
        cycle = find_cycle(op, before, start_us)
        if cycle:
            names = [self._name(k) for k in cycle]
            detail = f"waits for itself: {cycle_text(names)}, each for the one before it."
            self._broken("deadlock", names[0], float(start_us[cycle[0]]), detail)

    @cached_property
    def _edges(self) -> tuple[Ints, Ints, Floats]:
        """Precedences by streams, waits and rules: indices of ops and of their predecessors, and the delays."""
        follows = 1 + np.flatnonzero(self.list_of[1:] == self.list_of[:-1])
        waiting, awaited, _ = self._waits
        present = awaited >= 0
        edges = [
            (follows, follows - 1, np.zeros(len(follows))),
            (waiting[present], awaited[present], np.zeros(present.sum())),
            *self._dependencies,
        ]
        op, before, delay_us = (np.concatenate(column) for column in zip(*edges, strict=True))
        if len(self.joined):  # what one op of a block waits for, both do, and not for each other
            whole = np.arange(len(self.key) + len(self._barrier_us))
            whole[self.joined + 1] = self.joined
            apart = whole[op] != whole[before]
            op, before, delay_us = op[apart], before[apart], delay_us[apart]
            in_block = np.isin(whole[op], self.joined)
            other = self.partner[op[in_block]]
            op = np.concatenate([op, other])
            before, delay_us = (np.concatenate([column, column[in_block]]) for column in (before, delay_us))
        return op, before, delay_us

    def _check_sums(self) -> None:
        """The stated value is not below the value with exact times by more than one tolerance.

        Each op may start one tolerance too early, and these errors add up along a path. A path is at most as long as by
        the stated times plus the sum of all such errors. If that stays within the tolerance, as in any schedule whose
        times are float sums, the exact value need not be computed.
        """
        claimed = self.schedule.value_us
        limit_us = claimed + max(RELATIVE_TOLERANCE * claimed, self.resolution_us)
        op, before, delay_us = self._edges
        copy, earlier = self._channel_pairs(self.start_us + self.end_us)
        op, before = np.concatenate([op, copy]), np.concatenate([before, earlier])
        delay_us = np.concatenate([delay_us, np.zeros(len(copy))])
        start_us, duration_us = self._with_barriers(self.start_us, self._barrier_us)
        missing_us = np.zeros(len(start_us))
        np.maximum.at(missing_us, op, start_us[before] + duration_us[before] + delay_us - start_us[op])
        if self._value_us(self.start_us) + missing_us.sum() > limit_us:
            least_us = self._exact_value_us(limit_us)
            if least_us > limit_us:
                detail = f"is {claimed!r}, but with exact durations and delays these orders take {least_us!r}."
                self._broken("claim", "value_us", None, detail)

    def _with_barriers(self, start_us: Floats, barrier_us: Floats) -> tuple[Floats, Floats]:
        """Starts and durations of ops, and behind them of barriers, which take no time."""
        return np.concatenate([start_us, barrier_us]), np.append(self.duration_us, np.zeros(len(barrier_us)))

    def _value_us(self, start_us: Floats) -> float:
        """Value of the objective at these starts with exact durations."""
        end_us = start_us + self.duration_us
        if self.problem.objective == "makespan":
            return span(start_us, end_us)
        slices = [self._device_slice(d) for d in range(len(self.schedule.devices))]
        return max(span(start_us[s], end_us[s]) for s in slices)

    def _exact_value_us(self, limit_us: float) -> float:
        """Smallest value of the orders with exact times; for spans, a value within the limit if there is one.

        For spans, a device's first op is delayed until its last op ends within the limit of it. A delay of one device
        may delay others, and a longest path passes each device once: if some span exceeds the limit after as many
        rounds as there are devices, no timing keeps all of them within it.
        """
        ops, middle = slice(len(self.key)), np.append(self.start_us + self.end_us, 2 * self._barrier_us)
        _, duration_us = self._with_barriers(self.start_us, self._barrier_us)
        timing = _ExactTiming(duration_us, *self._edges, middle)
        timing.add(*self._channel_pairs(timing.rank))
        start_us = timing.earliest_us(np.zeros(len(middle)))
        if self.problem.objective == "makespan":
            return self._value_us(start_us[ops])
        slices = [s for s in map(self._device_slice, range(len(self.schedule.devices))) if s.start < s.stop]
        for _ in slices:
            if self._value_us(start_us[ops]) <= limit_us:
                break
            for s in slices:
                begin_us = (start_us[s] + self.duration_us[s]).max() - (limit_us - self.resolution_us)
                start_us[s] = np.maximum(start_us[s], begin_us)
            start_us = timing.earliest_us(start_us)
        return self._value_us(start_us[ops])

    def causes(self) -> Causes:
        """Why each op starts when it does."""
        waiting, awaited, _ = self._waits
        there = awaited >= 0
        needs = [*map(self._between_ops, self._dependencies), (waiting[there], awaited[there], np.zeros(there.sum()))]
        copy, earlier = self._channel_pairs(self.start_us + self.end_us)
        # Of causes that are met at once, rules and waits come before the order of a stream or channel.
        causes = [*needs, self._between_ops(self._edges), (copy, earlier, np.zeros(len(copy)))]
        op, before, delay_us = (np.concatenate(column) for column in zip(*causes, strict=True))
        met = self.end_us[before] + delay_us >= self.start_us[op] - self.tolerance
        found, first = np.unique(op[met], return_index=True)
        starts_after, gap_us = np.full(len(self.key), -1, np.int64), np.zeros(len(self.key))
        starts_after[found], gap_us[found] = before[met][first], delay_us[met][first]
        needed = sum(len(column) for column, _, _ in needs)
        return Causes(self.ops, (op[:needed], before[:needed]), starts_after, gap_us, self._chain(starts_after))

    def _between_ops(self, edges: tuple[Ints, Ints, Floats]) -> tuple[Ints, Ints, Floats]:
        """Edges between ops alone: for a barrier stands the op of its pass that ended last."""
        op, before, delay_us = edges
        last = np.full(len(self.key) + len(self._barrier_us), -1)
        last[: len(self.key)] = np.arange(len(self.key))
        passes = np.flatnonzero(self.spread)
        passes = passes[np.argsort(self.end_us[passes], kind="stable")]
        last[self._barrier(self.ops.kind[passes] - len(KINDS), self.ops.microbatch[passes])] = passes
        there = (op < len(self.key)) & (last[before] >= 0)
        return op[there], last[before[there]], delay_us[there]

    def _chain(self, starts_after: Ints) -> Sequence[int]:
        """Chain of causes up to the last op of the device that sets the value, in order of time."""
        by_span = self.problem.objective == "device_span"
        slices = [s for s in map(self._device_slice, range(len(self.schedule.devices))) if s.start < s.stop]
        if not slices:
            return []
        ends = [self.end_us[s].max() - by_span * self.start_us[s].min() for s in slices]
        last = slices[int(np.argmax(ends))]
        k = last.start + int(np.argmax(self.end_us[last]))
        chain: dict[int, None] = {}
        while k >= 0 and k not in chain:  # in a schedule with faults causes may go round
            chain[k] = None
            k = int(starts_after[k])
        return [*chain][::-1]


class _ExactTiming:
    """Earliest starts of ops without a cycle; `rank` is the position of each op in a topological order.

    Of the ops that can come next, the one with the smallest `middle` does, so the order follows the stated times where
    these differ.
    """

    def __init__(self, duration_us: Floats, op: Ints, before: Ints, delay_us: Floats, middle: Floats) -> None:
        self.duration_us = duration_us
        size = len(duration_us)
        self.needs: list[list[tuple[int, float]]] = [[] for _ in range(size)]
        after: list[list[int]] = [[] for _ in range(size)]
        for k, earlier, gap_us in zip(op.tolist(), before.tolist(), delay_us.tolist(), strict=True):
            self.needs[k].append((earlier, gap_us))
            after[earlier].append(k)
        left = [len(needs) for needs in self.needs]
        ready = [(at, k) for k, at in enumerate(middle.tolist()) if not left[k]]
        heapify(ready)
        self.sequence: list[int] = []
        while ready:
            _, k = heappop(ready)
            self.sequence.append(k)
            for later in after[k]:
                left[later] -= 1
                if not left[later]:
                    heappush(ready, (float(middle[later]), later))
        self.rank = np.empty(size, np.int64)
        self.rank[self.sequence] = np.arange(size)

    def add(self, op: Ints, before: Ints) -> None:
        """Add precedences; each predecessor must have a lower rank."""
        for k, earlier in zip(op.tolist(), before.tolist(), strict=True):
            self.needs[k].append((earlier, 0.0))

    def earliest_us(self, release_us: Floats) -> Floats:
        """Earliest starts, none before its release."""
        start_us, duration_us = release_us.tolist(), self.duration_us.tolist()
        for k in self.sequence:
            for earlier, gap_us in self.needs[k]:
                ready_us = start_us[earlier] + duration_us[earlier] + gap_us
                if ready_us > start_us[k]:
                    start_us[k] = ready_us
        return np.array(start_us)


_DOING = {"F": ("F",), "B": ("B", "BW", "CB", "CBW"), "W": ("W", "BW", "CBW")}
"""Kinds that do what passes come after, and what gates delay; those of O, R and C delay ops of that kind alone."""


def find_cycle(op: Ints, before: Ints, start_us: Floats) -> list[int] | None:
    """Indices of ops on some cycle, each of which waits for the one before it and the first for the last, or None.

    Op `op[k]` waits for op `before[k]`; `start_us` holds the starts of all ops, valid or not.
    """
    # Along a cycle starts advance as far as they go back, so no edge of a cycle advances further than all edges
    # together go back (up to rounding). This discards nearly all edges of most schedules.
    forward_us = start_us[op] - start_us[before]
    chosen = np.flatnonzero(forward_us <= -1.001 * forward_us.clip(max=0).sum())
    needs: dict[int, list[int]] = {}
    for k, earlier in zip(op[chosen].tolist(), before[chosen].tolist(), strict=True):
        needs.setdefault(k, []).append(earlier)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return list(error.args[1][:-1])
    return None
