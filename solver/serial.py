"""The floor: one microbatch at a time, with activations offloaded or recomputed where the budget asks for it.

Slow, but it needs less memory than anything else known for a placement, so it is where a search can begin when no
published schedule fits, and it tells which budgets are known to do.

With one microbatch at a time what a device holds follows from how each of its stages treats it. A stage takes at most
`peak_bytes` on top of what the stages before it on the device have left there, and leaves `left_bytes` itself until its
backward. `_least_options` chooses among all options of all stages of a device by dynamic programming over the pairs
(bytes left by the stages so far, peak so far), of which it keeps those that no other is below: an exact minimum of the
peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from optpipe.errors import InputError, Issue
from optpipe.fields import MAX_BYTES
from optpipe.kinds import COPIES, KIND, OPTIONAL
from optpipe.ops import DeviceOrders, Op, OpArray, Orders, WaitArray
from optpipe.problem import Problem
from optpipe.task_graph import Lag, TaskGraph, lower
from solver.build import orders_from_times, peak_budgets


def serial_orders(problem: Problem) -> Orders | None:
    """Orders of the floor within the budgets, or None where even it needs more."""
    return _within(problem, [device.memory_bytes for device in problem.devices])


def known_budgets_bytes(problem: Problem) -> list[int]:
    """For each device the smallest budget with which the floor runs, all of them together."""
    if problem.has_modes:
        return peak_budgets(problem, _with_modes(problem))
    no_limits: list[int | None] = [None] * len(problem.devices)
    eager, lazy = _Serial(problem, no_limits, eager=True).orders(), _Serial(problem, no_limits).orders()
    assert eager is not None
    assert lazy is not None
    everything_leaves = peak_budgets(problem, eager)
    least = [min(pair) for pair in zip(everything_leaves, peak_budgets(problem, lazy), strict=True)]
    # With little room on the host what leaves one device may keep that of another from leaving.
    return least if _within(problem, least) is not None else everything_leaves


def _within(problem: Problem, budgets: Sequence[int | None]) -> Orders | None:
    """Orders in which what takes needed room leaves or, where the host has no room for that, whatever may leave."""
    lazy = _Serial(problem, budgets).orders()
    orders = lazy if lazy is not None else _Serial(problem, budgets, eager=True).orders()
    if orders is None and problem.has_modes:
        orders = _with_modes(problem)
        peaks = peak_budgets(problem, orders)
        return None if any(b is not None and p > b for p, b in zip(peaks, budgets, strict=True)) else orders
    return orders


@dataclass(frozen=True)
class OptionOps:
    """Treatment of a microbatch on a stage: the number of its mode, its ops, and its memory on the device.

    `forward` are the ops up to where it rests, `backward` those after; `left_bytes` stay between the two. `peak_bytes`
    is that of all ops, `peak_before_weight_bytes` that of all but a W, which itself needs `weight_bytes`.
    """

    mode: int
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    left_bytes: int
    peak_bytes: int
    peak_before_weight_bytes: int
    weight_bytes: int


def options_of(graph: TaskGraph, s: int, unit: int) -> list[OptionOps]:
    """Every mode of a unit on a stage in every form, the backward split or fused where it may be."""
    found = []
    for mode in range(graph.options[s]):
        for kinds in _chains(graph, s, mode):
            types = [graph.type_of(kind, s, mode, unit) for kind in kinds]
            changes = graph.device_bytes[types].ravel().tolist()
            rests = 1 + max(n for n, kind in enumerate(kinds) if KIND[kind].ascends)  # after O, or F
            left, levels = sum(changes[: 2 * rests]), list(accumulate(changes))
            before_weight, weight = (levels[:-2], -changes[-1]) if "W" in kinds else (levels, 0)
            found.append(OptionOps(mode, kinds[:rests], kinds[rests:], left, max(levels), max(before_weight), weight))
    return found


def _chains(graph: TaskGraph, s: int, mode: int) -> list[tuple[str, ...]]:
    """The ops of a unit in a mode in every form; a W that may have to wait for passes behind its B stands alone."""
    return [kinds for kinds in graph.chains(s, mode) if "W" in kinds or ("W", s) not in graph.gates]


def _least_options(stages: Sequence[Sequence[OptionOps]]) -> list[OptionOps]:
    """An option for each stage of a device, in their order, with which its peak is smallest."""
    states: list[tuple[int, int, list[OptionOps]]] = [(0, 0, [])]
    for choices in stages:
        grown = [
            (left + option.left_bytes, max(peak, left + option.peak_bytes), [*chosen, option])
            for left, peak, chosen in states
            for option in choices
        ]
        grown.sort(key=lambda state: state[:2])
        lowest = accumulate((peak for _, peak, _ in grown), min)
        states = [grown[0], *(state for state, low in zip(grown[1:], lowest, strict=False) if state[1] < low)]
    return min(states, key=lambda state: state[1])[2]


def _with_modes(problem: Problem) -> Orders:
    """Orders of the floor with the modes that need the least memory of each device, within the host's budget."""
    graph = lower(problem)
    copied = graph.sizes_bytes["copied"]
    for host in (True, False):
        chosen: dict[tuple[int, int], OptionOps] = {}
        for i in _planned_microbatches(problem):
            for stages in problem.stages_of:
                places = [(s, unit) for unit in _units_of(problem, i) for s in stages]
                able = [[option for option in options_of(graph, *at) if host or not _copies(option)] for at in places]
                chosen |= dict(zip(places, _least_options(able), strict=True))
        if problem.host_memory_bytes is None or problem.host_memory_bytes >= max(
            sum(int(copied[s, option.mode, graph.unit_class[u]]) for (s, u), option in chosen.items() if u in units)
            for units in (_units_of(problem, i) for i in _planned_microbatches(problem))
        ):
            break
    planned: dict[Op, tuple[float, float]] = {}
    modes = np.zeros((len(problem.stages), problem.units), np.int64)
    for i in _planned_microbatches(problem):
        there = sorted(((s, unit) for s, unit in chosen if unit in _units_of(problem, i)), key=lambda at: at[::-1])
        ops = []
        for step in _steps(problem, graph, i):
            own = chosen.get((step.stage, step.microbatch)) if step.kind in KIND else None
            kinds = [step.kind] if own is None else _kinds_at(step, own, graph)
            ops += [step._replace(kind=kind) for kind in kinds]
        planned |= {op: (len(planned) + n, len(planned) + n + 1) for n, op in enumerate(ops)}
        for at in there:
            modes[at] = chosen[at].mode
    if problem.units > len(_planned_microbatches(problem)) * problem.slice_count:
        modes[:, 2:] = modes[:, 1:2]
    return _for_all(problem, orders_from_times(problem, planned, modes=modes))


def _kinds_at(step: Op, option: OptionOps, graph: TaskGraph) -> list[str]:
    """The ops of a unit in an option at one of its `_steps`."""
    if step.kind in ("F", "O"):
        apart = ("O", step.stage) in graph.gates
        return [kind for kind in option.forward if (kind == "O" and apart) == (step.kind == "O")]
    return [kind for kind in option.backward if (kind == "W") == (step.kind == "W")]


def _planned_microbatches(problem: Problem) -> range:
    """The microbatches that are planned: two where all are alike, of which the second is repeated, else all."""
    return range(min(problem.microbatches, 2) if problem.has_equal_microbatches else problem.microbatches)


def _units_of(problem: Problem, i: int) -> range:
    """The units of a microbatch."""
    return range(i * problem.slice_count, (i + 1) * problem.slice_count)


def _steps(problem: Problem, graph: TaskGraph, i: int) -> list[Op]:
    """The forwards of a microbatch, its backwards with all that these need, and its spread passes, one by one.

    A pass runs as late as may be: before what waits for it. So does a W that gates delay; any other follows its B, and
    has a step also where it is fused with that. An O that gates delay has a step as soon as may be, any other follows
    its F without one. Before B is all that R and C may wait for.
    """
    steps: list[Op] = []
    done = set[int | tuple[str, int]]()
    late: dict[int | tuple[str, int], tuple[Sequence[Lag], list[Op]]] = {
        at: (lags, [Op("W", at[1], i)]) for at, lags in graph.gates.items() if at[0] == "W"
    }
    late |= {n: (one.after, [Op(one.name, d, i) for d in one.devices]) for n, one in enumerate(graph.passes)}

    def named(after: Iterable[Lag]) -> list[int | tuple[str, int]]:
        return [(lag.duty, lag.stage) if lag.spread is None else lag.spread for lag in after]

    def run(names: Iterable[int | tuple[str, int]]) -> None:
        for name in names:
            if name in late:
                after, ops = late.pop(name)
                run(named(after))
                steps.extend(ops)
                done.add(name)

    def may_run(name: int | tuple[str, int]) -> bool:
        if name not in late:
            return name in done
        befores = named(late[name][0]) if isinstance(name, int) else [*named(late[name][0]), ("B", name[1])]
        return all(map(may_run, befores))

    def gates_of(*kinds: str) -> Iterator[tuple[int, list[int | tuple[str, int]]]]:
        for (kind, s), lags in graph.gates.items():
            if kind in kinds and (kind not in OPTIONAL or graph.duties[kind][s].any()):
                yield s, named(lags)

    stages = range(len(problem.stages))
    places = [(s, unit) for unit in _units_of(problem, i) for s in stages]
    leaving = dict(gates_of("O"))
    for kinds, ordered in (("F", places), ("RCB", places[::-1])):
        gated = [*gates_of(*kinds)]
        for s, unit in ordered:
            run(name for at, names in gated if at == s for name in names)
            own = [kinds[-1], *("W" for _ in range(kinds[-1] == "B" and ("W", s) not in graph.gates))]
            steps += [Op(kind, s, unit) for kind in own]
            done.update((kind, s) for kind in own)
            for t, names in [*leaving.items()]:
                if ("F", t) in done and all(map(may_run, names)):
                    run(leaving.pop(t))
                    steps.append(Op("O", t, i))
    run([*late])
    return steps


def _for_all(problem: Problem, orders: Orders) -> Orders:
    """Orders of the planned microbatches for all of them."""
    planned_all = len(_planned_microbatches(problem)) == problem.microbatches
    return orders if planned_all else _repeated(orders, problem.microbatches)


def _copies(option: OptionOps) -> bool:
    """True if an activation leaves in an option."""
    return not {*COPIES}.isdisjoint(option.forward)


def impossible_budgets(problem: Problem) -> list[tuple[int, int, int]]:
    """Devices whose budget is below what a single microbatch of one of their stages needs.

    Each as (device, bytes needed, budget). No schedule exists if there is any: the activation is whole when its F
    has run and again when its B runs. Of a microbatch's last slice both run while the slices before it are there; its W
    may run when these have freed all that they hold.
    """
    short = []
    for d, stages in enumerate(problem.stages_of):
        budget = problem.devices[d].memory_bytes
        needed = max((_alone_bytes(problem, s) for s in stages), default=0)
        if budget is not None and needed > budget:
            short.append((d, needed, budget))
    return short


def with_statable_peaks(problem: Problem) -> Problem:
    """The problem with `MAX_BYTES` as the budget of devices that have none and could hold more than that.

    A schedule states peaks up to there. Raises InputError where one microbatch alone needs more.
    """
    counts, graph = np.bincount(problem.unit_class).tolist(), lower(problem)
    beyond = []
    for d, stages in enumerate(problem.stages_of):
        if problem.devices[d].memory_bytes is None:
            most = sum(
                count * max(option.peak_bytes for option in options_of(graph, s, unit))
                for s in stages
                for count, unit in zip(counts, problem.class_units, strict=True)
            )
            most += sum(
                count * int(one.kept_bytes[d, u] + one.workspace_bytes[d, u])
                for one in graph.passes
                for u, count in enumerate(counts)
            )
            beyond += [d] if most > MAX_BYTES else []
    if not beyond:
        return problem
    limited = problem.replaced(
        devices=[
            device.replaced(memory_bytes=MAX_BYTES) if d in beyond else device
            for d, device in enumerate(problem.devices)
        ]
    )
    for d, needed, _ in impossible_budgets(limited):
        if d in beyond:
            detail = (
                f"is null, but one microbatch alone needs {needed} bytes, and a schedule states a peak of at most "
                f"{MAX_BYTES}. Maybe the sizes of the device's stages are in another unit than bytes."
            )
            raise InputError([Issue(("devices", d, "memory_bytes"), "too_large", detail)])
    return limited


def _alone_bytes(problem: Problem, s: int) -> int:
    """The least peak of one microbatch alone on a stage, over all modes, and whether its backward is split or fused."""
    graph = lower(problem)
    of_classes = [options_of(graph, s, unit) for unit in problem.class_units]
    waiting = [min(option.left_bytes for option in found) for found in of_classes]
    classes = np.unique(graph.unit_class.reshape(-1, problem.slice_count), axis=0).tolist()

    def least_peak(last: int, before_bytes: int) -> int:
        return min(
            max(option.peak_before_weight_bytes + before_bytes, option.weight_bytes) for option in of_classes[last]
        )

    return max(least_peak(last, sum(waiting[unit] for unit in before)) for *before, last in classes)


def _repeated(orders: Orders, microbatches: int) -> Orders:
    """Orders of two microbatches, one after the other, with the second repeated for all that follow."""
    if microbatches <= 2:
        return orders
    waits = WaitArray.of(orders.waits)
    second = np.flatnonzero(waits.op.microbatch)
    at, later = np.repeat(second, microbatches - 2), np.tile(np.arange(1, microbatches - 1), len(second))
    repeated = [
        OpArray.joined([ops, OpArray(ops.kind[at], ops.stage[at], ops.microbatch[at] + later, ops.passes)])
        for ops in (waits.op, waits.before)
    ]
    devices = [DeviceOrders(*(_tiled(ops, microbatches) for ops in device.streams())) for device in orders.devices]
    channels = [_tiled(channel, microbatches) for channel in orders.channels]
    return Orders(devices, WaitArray(*repeated), channels, orders.modes)


def _tiled(ops: Sequence[Op], microbatches: int) -> OpArray:
    first = OpArray.of(ops)[: len(ops) // 2]
    which = np.repeat(np.arange(microbatches), len(first))
    return OpArray(np.tile(first.kind, microbatches), np.tile(first.stage, microbatches), which, first.passes)


class _Serial:
    """Plans one op after another, one microbatch after another; the place in that sequence is the planned time.

    A microbatch leaves every device empty, so each runs as the one before. Two are planned (the first finds no
    releases to wait for) and the second is repeated; all are where they differ, or are cut into slices.
    Offloads the longest-lived activation when an op needs room or, if `eager`, whatever may leave as soon as it may.
    """

    def __init__(self, problem: Problem, budgets: Sequence[int | None], eager: bool = False) -> None:
        self.problem, self.graph = problem, lower(problem)
        self.bytes = self.graph.device_bytes.tolist()
        self.backwards = [[kinds for _, *kinds in _chains(self.graph, s, 0)] for s in range(len(problem.stages))]
        self.budgets = budgets
        self.eager = eager
        self.planned: dict[Op, tuple[float, float]] = {}
        self.memory = [0] * len(problem.devices)
        self.offloaded: set[tuple[int, int]] = set()
        self.held_by_gates = {(s, i) for kind, s in self.graph.gates if kind == "O" for i in range(problem.units)}
        self.on_host_bytes = 0
        self.resident: list[dict[tuple[int, int], None]] = [{} for _ in problem.devices]

    def orders(self) -> Orders | None:
        """The orders, or None where a budget (or the host's) is too small."""
        if not all(self._microbatch(i) for i in _planned_microbatches(self.problem)):
            return None
        return _for_all(self.problem, orders_from_times(self.problem, self.planned))

    def _microbatch(self, i: int) -> bool:
        run = {"F": self._forward, "B": self._backward, "W": self._weight, "O": self._let_leave}
        steps = _steps(self.problem, self.graph, i)
        return all(run[op.kind](*op[1:]) if op.kind in run else self._apart(op) for op in steps)

    def _apart(self, op: Op) -> bool:
        """Run an op for which no room is made ahead: that of a spread pass, or a W."""
        device = int(self.graph.device[op.stage]) if op.kind in KIND else op.stage
        if not self._make_room(device, self._changes(*op)[0]):
            return False
        self._run(op)
        return True

    def _forward(self, s: int, i: int) -> bool:
        device = int(self.graph.device[s])
        if not self._make_room(device, self._changes("F", s, i)[0]):
            return False
        self._run(Op("F", s, i))
        self.resident[device][s, i] = None
        if self.eager and self._may_leave(s, i):
            self._offload(s, i)
        return True

    def _let_leave(self, s: int, i: int) -> bool:
        """Let an activation leave from now on that gates have held."""
        self.held_by_gates.remove((s, i))
        if self.eager and self._may_leave(s, i):
            self._offload(s, i)
        return True

    def _backward(self, s: int, i: int) -> bool:
        device = int(self.graph.device[s])
        room, kinds = self._backward_room(s, i)
        back = self._moved(s, i) if (s, i) in self.offloaded else 0
        self.resident[device].pop((s, i), None)
        if not self._make_room(device, back + room):
            return False
        if (s, i) in self.offloaded:
            self._run(Op("R", s, i))
            self.offloaded.remove((s, i))
            self.on_host_bytes -= back
        for kind in kinds:
            if kind != "W":
                self._run(Op(kind, s, i))
        return True

    def _weight(self, s: int, i: int) -> bool:
        """Run the W of a backward that is split."""
        return "W" not in self._backward_room(s, i)[1] or self._apart(Op("W", s, i))

    def _backward_room(self, s: int, i: int) -> tuple[int, Sequence[str]]:
        """Memory of a backward without the activation, and its ops: split, unless fused needs less or it never splits.

        None where the stage has F alone.
        """
        rooms = [
            max(accumulate(change for kind in kinds for change in self._changes(kind, s, i)), default=0)
            for kinds in self.backwards[s]
        ]
        return min(zip(rooms, self.backwards[s], strict=True), key=lambda entry: entry[0])

    def _changes(self, kind: str, s: int, i: int) -> list[int]:
        """Changes of device memory at the start and at the end of an op."""
        option = int(self.graph.whole_option[s]) if kind in COPIES else 0
        changes: list[int] = self.bytes[self.graph.type_of(kind, s, option, i)]
        return changes

    def _make_room(self, device: int, needed: int) -> bool:
        """Offload activations of a device, of those that may leave the longest-lived, until `needed` bytes are free."""
        budget = self.budgets[device]
        while budget is not None and self.memory[device] + needed > budget:
            leaving = next((at for at in self.resident[device] if self._may_leave(*at)), None)
            if leaving is None:
                return False
            self._offload(*leaving)
        return True

    def _may_leave(self, s: int, i: int) -> bool:
        """True if the activation can be offloaded, no gate holds it, and the host has room for it."""
        limit = self.problem.host_memory_bytes
        if not self.graph.whole_option[s] or (s, i) in self.held_by_gates:
            return False
        return limit is None or self.on_host_bytes + self._moved(s, i) <= limit

    def _moved(self, s: int, i: int) -> int:
        return int(self.graph.sizes_bytes["copied"][s, self.graph.whole_option[s], self.graph.unit_class[i]])

    def _offload(self, s: int, i: int) -> None:
        del self.resident[self.graph.device[s]][s, i]
        self.offloaded.add((s, i))
        self.on_host_bytes += self._moved(s, i)
        self._run(Op("O", s, i))

    def _run(self, op: Op) -> None:
        self.planned[op] = (len(self.planned), len(self.planned) + 1)
        device = self.graph.device[op.stage] if op.kind in KIND else op.stage
        self.memory[device] += sum(self._changes(*op))
