"""Neighbourhoods of a schedule: windows, with the ops before and after them as heads and tails.

Windows in time, of machines or of jobs are the usual neighbourhoods of large-neighbourhood search on schedules (Shaw
1998; Godard, Laborie and Nuijten 2005, who keep orders rather than times outside, as is done here).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optpipe.kinds import KIND, OPTIONAL, STREAMS
from optpipe.mode_names import OFFLOAD
from optpipe.ops import Ints, Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import Simulation, simulate
from optpipe.stage import Mode, Stage
from optpipe.task_graph import lower
from solver.build import orders_from_times, within_budgets
from solver.exact.rules import Edge, in_weight_order, rule_edges
from solver.exact.ticks import TimeGrid

NEVER = -(2**60)
"""The length of a path that does not exist."""


class Numbering:
    """Every op that a schedule may have, by number, with its length in ticks; and the rules between them.

    A backward that recomputes inside itself is two ops here, CB for the recomputation and B right behind it; so is one
    that cannot be split, B and W (`parts`). Ops of one kind and stage have numbers in the order in which they run, in
    which each has its `place`; so have those of a spread pass on a device. Lengths of copies and recomputations are
    those of `Surroundings.length` where activations have modes. `rules`: rows of (before, after, delay). `gated`: for
    each O, R and C that gates delay, the ops before it and the delays.
    """

    def __init__(self, problem: Problem, grid: TimeGrid) -> None:
        self.problem, self.grid = problem, grid
        graph = lower(problem)
        self.ops = [
            Op(kind, s, i)
            for s, stage in enumerate(problem.stages)
            for kind in _kinds(stage)
            for i in problem.units_in_order(kind[0]).tolist()
        ]
        self.ops += [
            Op(one.name, d, i)
            for one in graph.passes
            for d in one.devices
            for i in problem.units_in_order("F").tolist()
        ]
        self.place = np.arange(len(self.ops)) % problem.units
        self.index = {op: k for k, op in enumerate(self.ops)}
        columns = OpArray.of(self.ops).numbered(problem.pass_names)
        self.device = graph.device_of(columns)
        self.stream = np.array([STREAMS.index(op.stream) for op in self.ops])
        length, ticks = cache(grid.length), cache(grid.ticks)
        times_us = graph.duration_us[graph.types(columns)].tolist()
        self.length = np.array(
            [0 if self.has_modes(op.kind, op.stage) else length(us) for op, us in zip(self.ops, times_us, strict=True)]
        )
        edges = [(self._handed_over(edge), edge.after, ticks(edge.delay)) for edge in rule_edges(problem, self.index)]
        edges += [(k, self.index[op._replace(kind="B")], 0) for op, k in self.index.items() if op.kind == "CB"]
        self.rules = np.array(edges, np.int64).reshape(-1, 3)
        self.gated: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for before, after, delay in edges:
            (kind, s, _), other = self.ops[after], self.ops[before]
            if (kind, s) in graph.gates and kind in OPTIONAL and (other.kind not in KIND or other.stage != s):
                self.gated[after].append((before, delay))

    def _handed_over(self, edge: Edge) -> int:
        """The op at whose end an edge begins: for others a backward that cannot be split ends at W's end."""
        before, after = self.ops[edge.before], self.ops[edge.after]
        if before.kind != "B" or (after.kind in ("B", "W") and after.stage == before.stage):
            return edge.before
        whole = not self.problem.stages[before.stage].split_backward
        return self.index[before._replace(kind="W")] if whole else edge.before

    def parts(self, op: Op) -> Sequence[int]:
        """Numbers of the ops that an op of orders is here, in the order in which they run."""
        kinds = {"CB": ("CB", "B"), "BW": ("B", "W"), "CBW": ("CB", "B", "W")}.get(op.kind, (op.kind,))
        return [self.index[op._replace(kind=kind)] for kind in kinds]

    def has_modes(self, kind: str, s: int) -> bool:
        """True if what an op of this kind and stage takes depends on the mode of its activation."""
        return kind in ("O", "R", "C", "CB") and bool(self.problem.stages[s].modes)

    def ticks(self, kind: str, mode: Mode) -> int:
        """Length of a copy or recomputation of a microbatch in a mode; 0 where it has none."""
        copy = mode.offload
        if kind in ("O", "R"):
            time_us = 0.0 if copy is None else copy.offload_us if kind == "O" else copy.reload_us
        else:
            time_us = mode.recompute_us
        return self.grid.length(time_us) if time_us else 0


def _kinds(stage: Stage) -> Sequence[str]:
    copies = ("O", "R") if any(mode.offload for mode in stage.choices) else ()
    again = ("C", "CB") if any(mode.recomputes for mode in stage.choices) else ()
    return ("F", "B", "W", *copies, *again)


@dataclass(frozen=True)
class Surroundings:
    """Orders whose backwards are split, and their simulated times. Arrays are by number of the op.

    `modes`: that of each microbatch on each stage, as in `Orders`. `length`: what ops take in those.
    """

    numbering: Numbering
    orders: Orders
    simulation: Simulation
    present: NDArray[np.bool_]
    start: Ints
    modes: Ints
    length: Ints

    @classmethod
    def of(cls, numbering: Numbering, orders: Orders) -> Surroundings:
        """Time the orders; times are rounded down to ticks, which keeps every precedence."""
        simulation = simulate(numbering.problem, orders)
        parts = [numbering.parts(op) for op in simulation.ops]
        numbers = np.array([first for first, *_ in parts])
        present = np.zeros(len(numbering.ops), bool)
        present[numbers] = True
        start = np.zeros(len(numbering.ops), np.int64)
        since_us = simulation.start_us - simulation.start_us.min()
        start[numbers] = np.floor(since_us * float(numbering.grid.ticks_per_us) + 1e-6)
        problem, index = numbering.problem, numbering.index
        modes = np.zeros((len(problem.stages), problem.units), np.int64)
        length = numbering.length.copy()
        if orders.modes is not None:
            modes = orders.modes
        for s, stage in enumerate(problem.stages):
            for i in range(problem.units) if stage.modes else ():
                copied = Op("O", s, i) in index and present[index[Op("O", s, i)]]
                if orders.modes is None and copied:
                    modes[s, i] = stage.choice_numbers[OFFLOAD]
                choices = problem.stage_of(s, i).choices
                for kind in _kinds(stage)[3:]:
                    length[index[Op(kind, s, i)]] = numbering.ticks(kind, choices[modes[s, i]])
        for first, *others in parts:
            for k in others:
                present[k], start[k] = True, start[first] + length[first]
                first = k
        return cls(numbering, orders, simulation, present, start, modes, length)

    @property
    def value_us(self) -> float:
        """The objective."""
        return self.simulation.value_us

    @property
    def keeps_budgets(self) -> bool:
        """True if memory is within the budgets."""
        return within_budgets(self.numbering.problem, self.orders, self.simulation)

    @cached_property
    def end(self) -> Ints:
        """End of each op in ticks."""
        end: Ints = self.start + self.length
        return end

    @cached_property
    def by_start(self) -> Ints:
        """All ops of the schedule, by start."""
        present = np.flatnonzero(self.present)
        by_start: Ints = present[np.argsort(self.start[present], kind="stable")]
        return by_start

    @cached_property
    def streams(self) -> Sequence[Sequence[Ints]]:
        """For each device, the ops of its three streams in order."""
        return [[self._numbers(ops) for ops in device.streams()] for device in self.orders.devices]

    @cached_property
    def channels(self) -> Sequence[Ints]:
        """The ops of each copy channel that carries any, in order."""
        shared = [self._numbers(channel) for channel in self.orders.channels]
        taken = {int(k) for channel in shared for k in channel}
        alone = [ops for device in self.streams for ops in device[1:] if len(ops) and int(ops[0]) not in taken]
        return shared + alone

    def _numbers(self, ops: Sequence[Op]) -> Ints:
        return np.array([part for op in ops for part in self.numbering.parts(op)], np.int64)

    @cached_property
    def tails(self) -> Ints:
        """Row d: the time from the start of each op to the end of device d's last (NEVER where there is no path)."""
        length, parts = self.length, self.numbering.parts
        waits = [
            (parts(before)[-1], parts(op)[0], 0) for op, befores in self.orders.waits.items() for before in befores
        ]
        edges = np.concatenate([self.present_rules, *self._stream_edges(), np.array(waits, np.int64).reshape(-1, 3)])
        # Edges lead forward in time, so from the latest start back every tail is complete before it is used.
        edges = edges[np.argsort(-self.start[edges[:, 0]], kind="stable")]
        tails = np.full((len(self.streams), len(length)), NEVER, np.int64)
        for d, (compute, *_) in enumerate(self.streams):
            if len(compute):
                tails[d, compute[-1]] = length[compute[-1]]
        _lengthen(tails, length, edges)
        return tails

    @cached_property
    def present_rules(self) -> Ints:
        """The rules between ops of the schedule: rows of (before, after, delay)."""
        rules = self.numbering.rules
        kept: Ints = rules[self.present[rules[:, 0]] & self.present[rules[:, 1]]]
        return kept

    def _stream_edges(self) -> Iterator[Ints]:
        for ops in [*(ops for device in self.streams for ops in device), *self.channels]:
            yield np.stack([ops[:-1], ops[1:], np.zeros(max(len(ops) - 1, 0), np.int64)], axis=1)


@njit(cache=True)
def _lengthen(tails: Ints, length: Ints, edges: Ints) -> None:
    """Follow edges (from, to, delay), latest start of `from` first."""
    for e in range(len(edges)):
        before, after, delay = edges[e]
        for d in range(len(tails)):
            if tails[d, after] >= 0:
                tails[d, before] = max(tails[d, before], length[before] + delay + tails[d, after])


def with_split_backwards(problem: Problem, orders: Orders) -> Orders:
    """The orders with fused backwards split, where they can be, into B and W right behind it, W in the order of B."""
    simulation = simulate(problem, orders)
    planned, inside = {}, set()
    for op, k in simulation.index.items():
        start, end = float(simulation.start_us[k]), float(simulation.end_us[k])
        backward = Op("B", *op[1:])
        split = op.kind in KIND and problem.stages[op.stage].split_backward
        if op.kind in ("CB", "CBW") and split:
            inside.add(backward)
        if op.kind in ("BW", "CBW") and split:
            # Rounded, the difference may lie before a B without length, and W would then be the first of the two.
            middle = max(start, end - problem.stage_of(*op[1:]).backward_weight_us)
            planned[backward], planned[Op("W", *op[1:])] = (start, middle), (middle, end)
        else:
            planned[backward if op.kind == "CB" and split else op] = (start, end)
    in_order = in_weight_order(problem, planned)
    if problem.has_factors:  # W that differ: their slots change hands, as long as they are; it is the order that counts
        for s in range(len(problem.stages)):
            weights = [op for i in problem.units_in_order("W").tolist() if (op := Op("W", s, i)) in in_order]
            in_order.update(zip(weights, sorted(in_order[op] for op in weights), strict=True))
    times = {op._replace(kind="CB") if op in inside else op: slot for op, slot in in_order.items()}
    return orders_from_times(problem, times, modes=orders.modes)


BEFORE, INSIDE, AFTER = range(3)


@dataclass(frozen=True)
class Window:
    """Ops that start from `begin` to before `end` (ticks). Of these the ops in `free` may change places.

    `free` is by number of the op. Compute ops that are not free keep their order among one another; which activations
    leave for the host is decided anew only for stages and microbatches whose F is free.
    """

    begin: int
    end: int
    free: NDArray[np.bool_]


class Frame:
    """Side of the window on which every op lies (`where`, by number), and heads and tails of those inside.

    `heads`: earliest starts, after all inputs from before the window. `tails`, row d: the time from their end to that
    of device d, through ops after the window. `limits`: the end that each device has if the window stays as it is.
    `earliest`: the least start of any, which is before the window where a device idles there. `running`: ops before the
    window that end after that. Times in ticks.
    """

    def __init__(self, around: Surroundings, window: Window) -> None:
        self.around, self.window = around, window
        self.numbering = around.numbering
        self.problem = self.numbering.problem
        self.where = np.where(around.start < window.begin, BEFORE, np.where(around.start < window.end, INSIDE, AFTER))
        for op in around.simulation.ops:  # one op with several parts is where it begins
            if op.kind in ("CB", "BW", "CBW"):
                first, *others = self.numbering.parts(op)
                self.where[others] = self.where[first]
        self.inside = np.flatnonzero((self.where == INSIDE) & around.present)
        self.last_end = int(around.end[around.present].max())
        self.far = 4 * self.last_end + 1  # after everything that a window can delay
        self.heads = self._heads()
        self.earliest = min(window.begin, int(self.heads[self.inside].min(initial=window.begin)))
        self.running = np.flatnonzero((self.where == BEFORE) & (around.end > self.earliest) & around.present)
        self.tails = self._tails()
        self.limits: Ints = (around.end[self.inside] + self.tails[:, self.inside]).max(axis=1, initial=0)
        if self.problem.objective == "makespan":
            self.limits = np.full_like(self.limits, self.limits.max())

    def _heads(self) -> Ints:
        around, (source, target, delay) = self.around, self._rules(BEFORE, INSIDE)
        heads = np.zeros(len(around.start), np.int64)
        np.maximum.at(heads, target, around.end[source] + delay)
        for ops in self._sequences():  # streams and channels are free when their last op before the window has ended
            before = ops[self.where[ops] == BEFORE]
            inside = ops[self.where[ops] == INSIDE]
            if len(before):
                heads[inside] = np.maximum(heads[inside], around.end[before[-1]])
        return heads

    def _tails(self) -> Ints:
        around, (source, target, delay) = self.around, self._rules(INSIDE, AFTER)
        tails = np.full_like(around.tails, NEVER)
        for row, all_tails in zip(tails, around.tails, strict=True):
            np.maximum.at(row, source, delay + all_tails[target])
        for ops in self._sequences():  # whichever op of the window is last, the first one after it follows
            after = ops[self.where[ops] == AFTER]
            inside = ops[self.where[ops] == INSIDE]
            if len(after):
                tails[:, inside] = np.maximum(tails[:, inside], around.tails[:, after[:1]])
        for d, (compute, *_) in enumerate(around.streams):
            inside = compute[self.where[compute] == INSIDE]
            tails[d, inside] = np.maximum(tails[d, inside], 0)
        return tails

    def _rules(self, source: int, target: int) -> Ints:
        """The rules from one side of the window to another, transposed."""
        rules = self.around.present_rules
        chosen = (self.where[rules[:, 0]] == source) & (self.where[rules[:, 1]] == target)
        edges: Ints = rules[chosen].T
        return edges

    def _sequences(self) -> Iterator[Ints]:
        for device in self.around.streams:
            yield from device
        yield from self.around.channels

    def latest_end(self, k: int) -> int:
        """The time by which an op of the window must end so that the makespan does not grow; for spans a loose bound.

        A span may stay with later ends, where its device begins later too.
        """
        latest = 2 * self.last_end
        if self.problem.objective == "makespan":
            latest = min(latest, int((self.limits - self.tails[:, k]).min()))
        return latest

    def keeps_order(self, kinds: Iterable[str], s: int, i: int) -> bool:
        """True if ops of these kinds in the window would keep the order of the microbatches, and those of gates."""
        index, present, where = self.numbering.index, self.around.present, self.where
        for kind in kinds:
            if any(where[before] == AFTER for before, _ in self.numbering.gated.get(index[Op(kind, s, i)], ())):
                return False
            place = int(self.numbering.place[index[Op(kind, s, i)]])
            numbers = np.arange(self.problem.units) + index[Op(kind, s, i)] - place
            before, after = present[numbers] & (where[numbers] == BEFORE), present[numbers] & (where[numbers] == AFTER)
            if after[:place].any() or before[place:].any():
                return False
        return True

    def copy_head(self, k: int) -> int:
        """Earliest start of a new copy: its channel has done what lies before, and its activation is computed."""
        op = self.numbering.ops[k]
        ready = self.around.end[self.numbering.index[Op("F", *op[1:])]]
        channel = self._channel_of(k)
        before = channel[self.where[channel] == BEFORE]
        ends = self.around.end[before]
        inside = self.where[self.numbering.index[Op("F", *op[1:])]] == INSIDE
        return max(self.window.begin, 0 if inside else int(ready), int(ends.max(initial=0)), self._opens(k))

    def _opens(self, k: int) -> int:
        """When the gates of a new copy or recomputation are open, as far as what lies before the window says."""
        gated = self.numbering.gated.get(k, ())
        return max((int(self.around.end[j]) + delay for j, delay in gated if self.where[j] == BEFORE), default=0)

    def copy_tails(self, k: int) -> Ints:
        """Tails of a new copy: through the next copy of its channel, and for a reload through its B."""
        op = self.numbering.ops[k]
        after = [c for c in self._channel_of(k).tolist() if self.where[c] == AFTER][:1]
        if op.kind == "R" and self.where[self.numbering.index[Op("B", *op[1:])]] == AFTER:
            after.append(self.numbering.index[Op("B", *op[1:])])
        tails: Ints = self.around.tails[:, after].max(axis=1, initial=NEVER)
        return tails

    def recomputation_head(self, k: int) -> int:
        """Earliest start of a new C or CB: its device has done what lies before, and its inputs are there."""
        op, index = self.numbering.ops[k], self.numbering.index
        if op.kind == "CB":
            return max(self.window.begin, int(self.heads[index[op._replace(kind="B")]]))
        compute = self.around.streams[int(self.numbering.device[k])][0]
        before = compute[self.where[compute] == BEFORE]
        return max(self.window.begin, int(self.around.end[before].max(initial=0)), self._opens(k))

    def recomputation_tails(self, k: int) -> Ints:
        """Tails of a new C or CB: through the first op of its device after the window, and through its B."""
        op = self.numbering.ops[k]
        compute = self.around.streams[int(self.numbering.device[k])][0]
        after = compute[self.where[compute] == AFTER][:1].tolist()
        backward = self.numbering.index[op._replace(kind="B")]
        if self.where[backward] == AFTER:
            after.append(backward)
        tails: Ints = self.around.tails[:, after].max(axis=1, initial=NEVER)
        return tails

    def _channel_of(self, k: int) -> Ints:
        """The copies in the schedule that share a channel with op k, in order."""
        problem, numbering, op = self.problem, self.numbering, self.numbering.ops[k]
        device = problem.stages[op.stage].device
        group, kinds = next(one for one in lower(problem).channels if device in one[0] and op.kind in one[1])
        stages = [s for d in group for s in problem.stages_of[d] if "O" in _kinds(problem.stages[s])]
        copies = product(stages, kinds, range(problem.units))
        numbers = np.array([numbering.index[Op(kind, s, i)] for s, kind, i in copies], np.int64)
        present = numbers[self.around.present[numbers]]
        in_order: Ints = present[np.argsort(self.around.start[present], kind="stable")]
        return in_order


MOST_KEPT = 3
"""Largest number of ops that keep their order in a window, for each that is free: they cost time too, if less."""


def choose_window(around: Surroundings, random: np.random.Generator, size: int) -> Window:
    """A window in which about `size` ops in a row are free, fewer where many others lie between them.

    They are of all devices, of up to half of the devices next to one another, or of a few microbatches in a row; at a
    random place, or at either end, since warm-up and cool-down are where most schedules lose time.
    """
    numbering = around.numbering
    problem = numbering.problem
    kind = random.choice(("all", "devices", "microbatches"), p=(0.5, 0.3, 0.2))
    free = np.ones(len(around.start), bool)
    if kind == "devices":
        devices = np.unique(numbering.device)
        width = int(random.integers(1, max(len(devices) // 2, 1) + 1))
        first = int(random.integers(0, len(devices) - width + 1))
        free = np.isin(numbering.device, devices[first : first + width])
    elif kind == "microbatches":
        width = min(max(size // (3 * len(problem.stages)), 1), problem.units)
        first = int(random.integers(0, problem.units - width + 1))
        microbatch = np.array([op.microbatch for op in numbering.ops])
        free = (microbatch >= first) & (microbatch < first + width)
    order = around.by_start
    positions = np.flatnonzero(free[order])
    count = min(size, len(positions))
    last_begin = len(positions) - count
    anywhere = int(random.integers(0, last_begin + 1))
    begin = int(random.choice([0, last_begin, anywhere], p=(0.15, 0.15, 0.7)))
    first, last = int(positions[begin]), int(positions[begin + count - 1])
    last = min(last, first + (1 + MOST_KEPT) * count - 1)
    return Window(int(around.start[order[first]]), int(around.start[order[last]]) + 1, free)
