"""List schedules by priorities: each device runs the first ready op of a list, of passes and unequal units too.

A device that is free takes, of the ops that are ready and fit into its memory, the one of highest priority; it waits
for one of higher priority that is known to be ready soon. Orders of priorities and this patience are tried in turn.
Passes on which a forward or backward waits are urgent, all others as late as weights. Every activation is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from optpipe.errors import MethodError
from optpipe.ops import Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.task_graph import Lag, lower


class Rule(NamedTuple):
    """How a device chooses.

    `priorities`: an order of backwards, urgent passes, forwards, late passes and weights. `patience`: the share of an
    op's duration for which it waits for one of higher priority.
    """

    priorities: str
    patience: float


RULES = (
    *(Rule("UFBWL", 0.5), Rule("UBFLW", 0.0), Rule("UWFBL", 1.0), Rule("FLUBW", 0.0), Rule("UBFWL", 0.0)),
    *(Rule("FUBWL", 0.0), Rule("BFULW", 0.0), Rule("BFLUW", 1.0), Rule("UBWFL", 0.5), Rule("UFBLW", 0.5)),
    Rule("UFBLW", 1.0),
)
"""Those tried, the most useful first. In little memory a W, which frees some, goes before a late pass; with fused
backwards, or collectives that take long, a forward before a backward (docs/math/search.md)."""


class _Queue:
    """The ops of one kind at one place (stage, or device of a pass), in their order, with what they cost."""

    def __init__(self, problem: Problem, kind: str, place: int, letter: str) -> None:
        graph = lower(problem)
        self.kind, self.place, self.letter = kind, place, letter
        self.units: list[int] = problem.units_in_order(kind if kind in ("F", "B", "W", "BW") else "F").tolist()
        types = [graph.type_of(kind, place, 0, unit) for unit in self.units]
        self.duration_us: list[float] = graph.duration_us[types].tolist()
        self.left_bytes: list[int] = graph.change_bytes[types].tolist()
        self.needed_bytes: list[int] = graph.needed_bytes[types].tolist()
        self.end_us: list[float | None] = [None] * problem.units
        self.next = 0


def rules_for(problem: Problem) -> Iterator[Rule]:
    """The rules that may differ on a problem."""
    there = "UFBWL" if problem.spread else "FBW"
    yield from dict.fromkeys(
        rule._replace(priorities="".join(letter for letter in rule.priorities if letter in there)) for rule in RULES
    )


def list_orders(problem: Problem, rule: Rule) -> Orders:
    """The orders by a rule. Raises MethodError where memory lets no op run before all have.

    Measured for 8 devices and 128 microbatches with passes: 0.2 s, a time that grows with the ops.
    """
    made = _List(problem, rule)
    while made.events:
        time_us, device = heappop(made.events)
        made.act(time_us, device)
    if any(queue.next < len(queue.units) for queue in made.queues.values()):
        raise MethodError("the list ends where memory lets no op run.")
    return Orders.of_compute(OpArray.of(ops).numbered(problem.pass_names) for ops in made.compute)


class _List:
    """One list schedule as it is made."""

    def __init__(self, problem: Problem, rule: Rule) -> None:
        self.problem, self.graph, self.rule = problem, lower(problem), rule
        self.stages_of = problem.stages_of
        graph, devices = self.graph, range(len(problem.devices))
        self.queues: dict[tuple[str, int], _Queue] = {}
        urgent = self._urgent()
        for s, (trained, splits) in enumerate(zip(graph.trained.tolist(), graph.splits.tolist(), strict=True)):
            for kind in ("F", *(("B", "W") if splits else ("BW",)) * trained):
                self.queues[kind[0], s] = _Queue(problem, kind, s, kind[0])
        for n, one in enumerate(graph.passes):
            for d in one.devices:
                self.queues[one.name, d] = _Queue(problem, one.name, d, "U" if n in urgent else "L")
        self.of_device: list[list[_Queue]] = [[] for _ in devices]
        for queue in self.queues.values():
            home = int(graph.device[queue.place]) if queue.kind in ("F", "B", "W", "BW") else queue.place
            self.of_device[home].append(queue)
        rank = rule.priorities.index
        for queues in self.of_device:
            queues.sort(key=lambda queue: rank(queue.letter))
        self.left = [[len(one.devices)] * problem.units for one in graph.passes]
        self.barrier_us: list[list[float]] = [[0.0] * problem.units for _ in graph.passes]
        self.delays_us = {name: us.tolist() for name, us in graph.delays_us.items()}
        self.free_us, self.held = [0.0 for _ in devices], [0 for _ in devices]
        self.budget = [device.memory_bytes for device in problem.devices]
        self.reserve = [
            max((size for queue in queues if queue.letter != "F" for size in queue.needed_bytes), default=0)
            for queues in self.of_device
        ]
        self.promised = [0 for _ in devices]
        self.events: list[tuple[float, int]] = [(0.0, d) for d in devices]
        self.compute: list[list[Op]] = [[] for _ in devices]

    def _urgent(self) -> set[int]:
        """Passes on which gates of forwards and backwards wait, also through other passes."""
        gates = self.graph.gates.items()
        found, left = set[int](), [lag.spread for (duty, _), lags in gates if duty in ("F", "B") for lag in lags]
        while left:
            n = left.pop()
            if n is not None and n not in found:
                found.add(n)
                left += [lag.spread for lag in self.graph.passes[n].after]
        return found

    def act(self, time_us: float, device: int) -> None:
        """Let a free device begin an op, or wait."""
        if self.free_us[device] > time_us:
            return
        better_us = float("inf")  # when an op of higher priority is ready
        for queue in self.of_device[device]:
            ready_us = self._ready_us(queue)
            if ready_us is None:
                continue
            if ready_us > time_us:
                better_us = min(better_us, ready_us)
            elif self._fits(queue, device):
                if better_us < time_us + self.rule.patience * queue.duration_us[queue.next]:
                    return  # that op's own event wakes the device
                self._begin(queue, device, time_us)
                return

    def _fits(self, queue: _Queue, device: int) -> bool:
        budget, needed = self.budget[device], queue.needed_bytes[queue.next]
        if budget is None:
            return True
        if queue.letter != "F" or queue.place != self.stages_of[device][0]:
            return self.held[device] + needed <= budget
        # A microbatch enters a device where there is room for all of its forwards there, and for any op behind them.
        held = self.held[device] + self.promised[device]
        return held + max(needed, self._entering(device, queue.next) + self.reserve[device]) <= budget

    def _entering(self, device: int, number: int) -> int:
        """Bytes that the forwards of a microbatch leave on a device."""
        return sum(self.queues["F", s].left_bytes[number] for s in self.stages_of[device])

    def _ready_us(self, queue: _Queue) -> float | None:
        """When the next op of a queue may start; None where that is not known yet."""
        if queue.next == len(queue.units):
            return None
        kind, s, i = queue.letter, queue.place, queue.units[queue.next]
        if kind in "UL":
            return self._after(self.graph.passes[self.problem.pass_names.index(queue.kind)].after, s, i)
        times: list[float | None] = [self._after(self.graph.gates.get((kind, s), ()), int(self.graph.device[s]), i)]
        if kind == "F" and s:
            times.append(self._end("F", s - 1, i, self.delays_us["forward"][s - 1][i]))
        if kind == "B":
            times.append(self._end("F", s, i))
            if s + 1 < len(self.graph.device):
                times.append(self._end("B", s + 1, i, self.delays_us["backward"][s][i]))
        if kind == "W":
            times.append(self._end("B", s, i))
        return _latest(times)

    def _end(self, kind: str, place: int, i: int, delay_us: float = 0.0) -> float | None:
        end_us = self.queues[kind, place].end_us[i]
        return None if end_us is None else end_us + delay_us

    def _after(self, lags: Sequence[Lag], device: int, i: int) -> float | None:
        """When all waits of an op on a device are over."""
        times: list[float | None] = []
        for lag in lags:
            if lag.spread is not None:
                known = self.left[lag.spread][i] == 0
                times.append(self.barrier_us[lag.spread][i] + float(lag.us[i]) if known else None)
            else:
                duty = lag.duty if (lag.duty, lag.stage) in self.queues else "B"
                own = device == self.graph.device[lag.stage]
                times.append(self._end(duty, lag.stage, i, 0.0 if own else float(lag.us[i])))
        return _latest(times)

    def _begin(self, queue: _Queue, device: int, time_us: float) -> None:
        i, duration_us = queue.units[queue.next], queue.duration_us[queue.next]
        end_us = time_us + duration_us
        left = queue.left_bytes[queue.next]
        self.held[device] += left
        if queue.letter == "F":
            enters = queue.place == self.stages_of[device][0]
            self.promised[device] += (self._entering(device, queue.next) if enters else 0) - left
        queue.end_us[i] = self.free_us[device] = end_us
        queue.next += 1
        self.compute[device].append(Op(queue.kind, queue.place, i))
        heappush(self.events, (end_us, device))
        if queue.letter in "UL":
            n = self.problem.pass_names.index(queue.kind)
            self.left[n][i] -= 1
            self.barrier_us[n][i] = max(self.barrier_us[n][i], end_us)
            if self.left[n][i]:
                return
            end_us = self.barrier_us[n][i]
            waiting = [lag for lag in self.graph.lags if lag.spread == n]
        else:
            s, last = queue.place, len(self.graph.device) - 1
            if queue.letter == "F" and s < last:
                heappush(self.events, (end_us + self.delays_us["forward"][s][i], int(self.graph.device[s + 1])))
            if queue.letter == "B" and s:
                heappush(self.events, (end_us + self.delays_us["backward"][s - 1][i], int(self.graph.device[s - 1])))
            waiting = [lag for lag in self.graph.lags if lag.spread is None and lag.stage == s]
        for lag in waiting:
            for d in range(len(self.free_us)):
                heappush(self.events, (end_us, d))
                heappush(self.events, (end_us + float(lag.us[i]), d))


def _latest(times: Sequence[float | None]) -> float | None:
    """The latest of times, 0 of none; None where one is not known."""
    known = [time_us for time_us in times if time_us is not None]
    return max(known, default=0.0) if len(known) == len(times) else None
