"""1F1B that adapts to memory: forwards as far ahead as activations of unequal microbatches and slices have room for.

DynaPipe (EuroSys 2024, arXiv 2311.10418, "memory-aware adaptive scheduling") lets a device run a forward whenever
memory has room for its activation, and a backward whenever there is one. That alone may deadlock: slices of a later
microbatch, or its forwards on an earlier stage of the device, can take what an older microbatch needs to come back. So
a device begins nothing after which its microbatches could not be finished one after another, the oldest first, each
beside all that the younger ones hold by then: a safe state in the sense of Dijkstra's banker (EWD 108).

Never deadlocks. A microbatch runs its ops on a device in one order: F by stage and slice, then backwards the other way
round. Take the oldest microbatch that is not finished, and its first op by stage and slice that has not run. What it
waits for has run, since all older microbatches are finished; it is next on its device, which is in a safe state, so it
fits; and it leaves a safe state. The only problems without a schedule of this kind are those where memory has no room
for one microbatch alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import NamedTuple

from optpipe.costs import device_effect
from optpipe.errors import MethodError
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.stage import Stage

AHEAD = (0, 1, 2, 4, 8)
"""Units that a stage may run ahead of 1F1B, as candidates; beside these as many as memory has room for."""

MOST_PLAYED_OPS = 30_000
"""F and backwards over all candidates, beside the first: a second."""

MOST_OPS = 60_000
"""F and backwards of a problem that is played at all: two seconds."""


def one_f_one_b_within_memory(problem: Problem) -> Orders:
    """The best candidate: orders without copies, each backward as a whole.

    Raises MethodError where memory has no room for one microbatch alone, or where there are more than MOST_OPS ops.
    """
    ops = 2 * len(problem.stages) * problem.units
    if ops > MOST_OPS:
        raise MethodError(f"{ops} forwards and backwards are too many to fit to memory one by one: at most {MOST_OPS}.")
    best, best_us = None, inf
    played = 0
    for ahead in (None, *AHEAD):
        if best is not None and played > MOST_PLAYED_OPS:
            break
        orders = Orders.of_compute(_Player(problem, ahead).play())
        played += ops
        value_us = simulate(problem, orders).value_us
        if value_us < best_us:
            best, best_us = orders, value_us
    assert best is not None
    return best


class _Step(NamedTuple):
    """An op of a microbatch on a device, or B with its W behind it; `change` of memory, `peak` of it meanwhile.

    `handed_over_us`: from its start until what waits for it may begin, without transfers.
    """

    ops: Sequence[Op]
    duration_us: float
    handed_over_us: float
    change: int
    peak: int


@dataclass
class _Path:
    """The steps of a microbatch on a device, and memory from each on: `peaks[k]`, `changes[k]` of steps k, k + 1, ...

    `done`: the number of steps that have begun.
    """

    steps: Sequence[_Step]
    peaks: Sequence[int] = field(init=False)
    changes: Sequence[int] = field(init=False)
    done: int = 0

    def __post_init__(self) -> None:
        peak, change, peaks, changes = 0, 0, [0], [0]
        for step in reversed(self.steps):
            peak, change = max(step.peak, step.change + peak), step.change + change
            peaks.append(peak)
            changes.append(change)
        self.peaks, self.changes = peaks[::-1], changes[::-1]


class _Player:
    """Discrete-event simulation: a free device takes a backward that is there, the oldest first, else an F, if safe.

    A stage has at most as many units between F and the end of its backward as 1F1B has, and `ahead` more (None: any
    number).
    """

    def __init__(self, problem: Problem, ahead: int | None) -> None:
        self.problem = problem
        stages, n = len(problem.stages), problem.slice_count
        self.most = [inf if ahead is None else stages - s + n - 1 + ahead for s in range(stages)]
        self.budget = [inf if d.memory_bytes is None else d.memory_bytes for d in problem.devices]
        self.level = [0] * len(problem.devices)
        self.in_flight = [0] * stages
        self.there_us: dict[Op, float] = {}
        """Arrival of the inputs that come from other stages, by the op that takes them."""
        self.passed = {(kind, s): 0 for kind in "FB" for s in range(stages)}
        """Units that have begun F or a backward of a stage, which they do in the order of the kind."""
        self.place = {kind: problem.units_in_order(kind).argsort().tolist() for kind in "FB"}
        self.forward_us, self.backward_us = (problem.unit_delays_us[name].tolist() for name in ("forward", "backward"))
        self.waiting = [list(self._paths(d)) for d in range(len(problem.devices))]
        """Paths of the unfinished microbatches on each device, the oldest first."""

    def _paths(self, device: int) -> Iterator[_Path]:
        n, stages = self.problem.slice_count, self.problem.stages_of[device]
        for i in range(self.problem.microbatches if stages else 0):
            units = range(i * n, (i + 1) * n)
            path = _Path(
                [_step(self.problem, "F", s, unit) for s in stages for unit in units]
                + [_step(self.problem, "B", s, unit) for s in reversed(stages) for unit in reversed(units)]
            )
            if path.peaks[0] > self.budget[device]:
                raise MethodError(
                    f"one microbatch alone needs {path.peaks[0]} bytes on device {device}, but its budget is "
                    f"{self.budget[device]}."
                )
            yield path

    def play(self) -> Sequence[Sequence[Op]]:
        """The ops of each device in their order."""
        devices = range(len(self.problem.devices))
        orders: list[list[Op]] = [[] for _ in devices]
        free_us = [0.0 for _ in devices]
        wake = [(0.0, self.problem.stages[0].device)]
        while wake:
            now, d = heappop(wake)
            path = self._choose(d, now) if now >= free_us[d] else None
            if path is None:
                continue
            step = path.steps[path.done]
            path.done += 1
            orders[d] += step.ops
            self.level[d] += step.change
            if path.done == len(path.steps):
                self.waiting[d].remove(path)
            free_us[d] = now + step.duration_us
            heappush(wake, (free_us[d], d))
            for there_us, near in self._hand_over(step, now):
                heappush(wake, (max(there_us, free_us[near]), near))
        assert not any(self.waiting), "the oldest microbatch can always go on"
        return orders

    def _choose(self, d: int, now: float) -> _Path | None:
        chosen: _Path | None = None
        for at, path in enumerate(self.waiting[d]):
            op = path.steps[path.done].ops[0]
            if op.kind == "F" and chosen is not None:
                continue
            if self._is_there(op, now) and self._is_safe(d, at):
                if op.kind != "F":
                    return path
                chosen = path
            if path.done == 0:  # nor have younger ones begun here
                break
        return chosen

    def _is_there(self, op: Op, now: float) -> bool:
        """True if what an op waits for has come, and it is next in the order of its kind."""
        kind, s, unit = op
        if kind == "F" and self.in_flight[s] >= self.most[s]:
            return False
        first = "F" if kind == "F" else "B"
        if self.passed[first, s] != self.place[first][unit]:
            return False
        begins = s == 0 if first == "F" else s == len(self.problem.stages) - 1
        return begins or self.there_us.get(Op(first, s, unit), inf) <= now

    def _is_safe(self, d: int, at: int) -> bool:
        """True if all in flight can be finished one after another once the next step of one of them has run."""
        paths, budget = self.waiting[d], self.budget[d]
        own = paths[at]
        step = own.steps[own.done]
        if self.level[d] + step.peak > budget:
            return False
        level = self.level[d] + step.change
        for k, path in enumerate(paths):
            done = path.done + (k == at)
            if done == 0:
                break
            if level + path.peaks[done] > budget:
                return False
            level += path.changes[done]
        return True

    def _hand_over(self, step: _Step, now: float) -> Iterator[tuple[float, int]]:
        """Record a step that begins now; yields the time at which its output arrives, and the device that takes it."""
        kind, s, unit = step.ops[0]
        forward = kind == "F"
        self.passed["F" if forward else "B", s] += 1
        self.in_flight[s] += 1 if forward else -1
        at_us, stages = now + step.handed_over_us, self.problem.stages
        near = s + 1 if forward else s - 1
        if 0 <= near < len(stages):
            delay_us = self.forward_us[s][unit] if forward else self.backward_us[near][unit]
            self.there_us[Op("F" if forward else "B", near, unit)] = at_us + delay_us
            yield at_us + delay_us, stages[near].device


def _step(problem: Problem, kind: str, s: int, unit: int) -> _Step:
    """F, or the backward of a unit: B and W, where that needs no more memory than both in one."""
    stage = problem.stage_of(s, unit)
    steps = [_as_step(stage, kinds, s, unit) for kinds in ([("B", "W")] * stage.split_backward + [("BW",)])]
    return _as_step(stage, ("F",), s, unit) if kind == "F" else min(steps, key=lambda step: step.peak)


def _as_step(stage: Stage, kinds: Sequence[str], s: int, unit: int) -> _Step:
    changes = list(accumulate(change for kind in kinds for change in device_effect(stage, kind)))
    lengths = [stage.duration_us(kind) for kind in kinds]
    return _Step([Op(kind, s, unit) for kind in kinds], sum(lengths), lengths[0], changes[-1], max(changes))
