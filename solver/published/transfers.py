"""Transfers for compute orders: what leaves the device, when it comes back, and which copy goes first.

The compute ops of each device run in a given order; copies run beside them (PipeOffload, arXiv 2503.01328):

- what leaves does so as soon as the channel is free, the longest-lived first;
- it comes back shortly before its B, never into room that ops before that B need, so that no copy can lock the device;
- a channel that serves both directions alternates between them, and one behind a switch between its devices too.

An op starts only where memory has room for it: a slow copy delays compute. Played event by event, this gives an order
of all starts and ends; `orders_of_plan` derives from that order the waits that keep memory safe under any timing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from optpipe.memory import device_effect
from optpipe.orders import KINDS, Op, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.plan import orders_of_plan

Activation = tuple[int, int]
"""Stage and microbatch."""


@dataclass(frozen=True)
class Wish:
    """What a plan should move: `leaving` at most, each back `lead` of its reload times before its B at the earliest."""

    leaving: set[Activation]
    lead: float


def plan_transfers(
    problem: Problem, compute: Sequence[Sequence[Op]], wish: Wish, budgets: Sequence[int | None]
) -> Orders | None:
    """Orders with the compute orders given and the transfers wished for, within `budgets` (bytes a device).

    What lives shorter than its round trip stays. Returns None where a device has no room for its next op and nothing
    left to offload.
    """
    planned = _Play(problem, compute, wish, budgets).run()
    return orders_of_plan(problem, planned) if planned else None


class _Device:
    """What one device has done so far. `place` and `starts_us` are those of its compute ops were no copy in the way."""

    def __init__(self, order: Sequence[Op], starts_us: Sequence[float], room: float, host_room: float) -> None:
        self.order = order
        self.starts_us = starts_us
        self.room = room
        self.host_room = host_room
        self.place = {op: place for place, op in enumerate(order)}
        self.next = 0
        self.busy = False
        self.resident: dict[int, deque[int]] = {}
        self.away: list[tuple[int, Activation]] = []

    @property
    def upcoming(self) -> Op | None:
        """The next compute op."""
        return self.order[self.next] if self.next < len(self.order) else None


@dataclass
class _Channel:
    """A copy channel: the (device, kind) pairs that it serves, and the one that it served last."""

    serves: Sequence[tuple[int, str]]
    busy: bool = False
    last: tuple[int, str] = (-1, "")


class _Play:
    """One play of compute orders and transfers, event by event."""

    def __init__(
        self, problem: Problem, compute: Sequence[Sequence[Op]], wish: Wish, budgets: Sequence[int | None]
    ) -> None:
        self.problem = problem
        self.wish = wish
        self.undisturbed = simulate(problem, Orders.of_compute(compute))
        effects = {(s, k): device_effect(stage, k) for s, stage in enumerate(problem.stages) for k in KINDS}
        self.change = {key: sum(effect) for key, effect in effects.items()}
        self.most = {key: max(effect.at_start, sum(effect)) for key, effect in effects.items()}
        self.duration = {
            (s, k): stage.duration_us(k)
            for s, stage in enumerate(problem.stages)
            for k in KINDS
            if stage.offload or k not in "OR"
        }
        self.devices = [self._device(*pair) for pair in zip(compute, budgets, strict=True)]
        self.channels_of: list[list[_Channel]] = [[] for _ in self.devices]
        for channel in _channels(problem):
            for d in sorted({d for d, _ in channel.serves}):
                self.channels_of[d].append(channel)
        self.due = {a: self._due(a) for a in wish.leaving if self._lives_long_enough(a)}
        self.arrived: dict[Op, float] = {}
        self.gone: set[Activation] = set()
        self.events: list[tuple[float, int, Op | None, int]] = []
        self.started: dict[Op, int] = {}
        self.planned: dict[Op, tuple[float, float]] = {}
        self.rank = 0
        self.now = 0.0

    def _device(self, order: Sequence[Op], budget: int | None) -> _Device:
        index, starts, host = self.undisturbed.index, self.undisturbed.start_us, self.problem.host_memory_bytes
        return _Device(
            order,
            [float(starts[index[op]]) for op in order],
            inf if budget is None else budget,
            # A share each, since no wait reaches across devices.
            inf if host is None else host // len(self.problem.devices),
        )

    def _lives_long_enough(self, activation: Activation) -> bool:
        index, s = self.undisturbed.index, activation[0]
        forward, backward = index[Op("F", *activation)], index[Op("B", *activation)]
        life = self.undisturbed.start_us[backward] - self.undisturbed.end_us[forward]
        return bool(life >= self.duration[s, "O"] + self.duration[s, "R"])

    def _due(self, activation: Activation) -> int:
        """The place in the compute order of its device from which on a reload is due."""
        device = self.devices[self.problem.stages[activation[0]].device]
        place = device.place[Op("B", *activation)]
        lead_us = self.wish.lead * self.duration[activation[0], "R"]
        return bisect_left(device.starts_us, device.starts_us[place] - lead_us, 0, place)

    def run(self) -> dict[Op, tuple[float, float]] | None:
        """For each op the ranks of its start and end among all events; None when stuck."""
        self._wake(range(len(self.devices)))
        while self.events:
            self.now = self.events[0][0]
            touched = set()
            while self.events and self.events[0][0] == self.now:
                *_, op, device = heappop(self.events)
                touched.add(device)
                if op:
                    touched |= self._end(op, device)
            self._wake(sorted(touched))
        return self.planned if all(device.upcoming is None for device in self.devices) else None

    def _wake(self, devices: Iterable[int]) -> None:
        """Start whatever can start on these devices and their channels: compute first, since it never waits idly."""
        for d in devices:
            self._start_compute(d)
        for d in devices:
            for channel in self.channels_of[d]:
                if not channel.busy:
                    self._start_copy(channel)

    def _start(self, op: Op, d: int) -> None:
        self.devices[d].room -= self.most[op.stage, op.kind]
        self.rank += 1
        self.started[op] = self.rank
        self._at(self.now + self.duration[op.stage, op.kind], op, d)

    def _at(self, time: float, op: Op | None, d: int) -> None:
        self.rank += 1
        heappush(self.events, (time, self.rank, op, d))

    def _end(self, op: Op, d: int) -> set[int]:
        """Book the end of an op; returns the other devices that may go on."""
        kind, s, i = op
        self.devices[d].room += self.most[s, kind] - self.change[s, kind]
        self.rank += 1
        self.planned[op] = (self.started[op], self.rank)
        if kind in "OR":
            return self._end_copy(op, d)
        self.devices[d].busy = False
        if kind == "F" and (s, i) in self.due:
            self.devices[d].resident.setdefault(s, deque()).append(i)
        if kind == "F" and s + 1 < len(self.problem.stages):
            self._announce(Op("F", s + 1, i), self.problem.forward_delay_us[s])
        if kind == "B" and s:
            self._announce(Op("B", s - 1, i), self.problem.backward_delay_us[s - 1])
        return set()

    def _announce(self, op: Op, delay_us: float) -> None:
        """The input of an op of a neighbour stage is on its way."""
        self.arrived[op] = self.now + delay_us
        self._at(self.now + delay_us, None, self.problem.stages[op.stage].device)

    def _start_compute(self, d: int) -> None:
        device, op = self.devices[d], self.devices[d].upcoming
        if op is None or device.busy or not self._ready(op) or self._lacks_room(device, op):
            return
        stay = device.resident.get(op.stage)
        if op.kind == "B" and stay and stay[0] == op.microbatch:
            stay.popleft()
        device.next += 1
        device.busy = True
        self._start(op, d)

    def _ready(self, op: Op) -> bool:
        """Whether an op has its input: from the neighbour stage, and back from the host."""
        kind, s, i = op
        if kind == "B" and (s, i) in self.gone:
            return False
        first = kind == "W" or (kind == "F" and s == 0) or (kind == "B" and s == len(self.problem.stages) - 1)
        return first or self.arrived.get(op, inf) <= self.now

    def _lacks_room(self, device: _Device, op: Op) -> bool:
        needed = self.most[op.stage, op.kind]
        return needed > 0 and needed > device.room

    def _start_copy(self, channel: _Channel) -> None:
        """Start the most pressing copy; of equal ones that of the other direction, the other device, the right B."""
        options = []
        for d, kind in channel.serves:
            found = self._next_offload(d) if kind == "O" else self._next_reload(d)
            if found:
                pressing, order, op = found
                options.append((not pressing, kind == channel.last[1], d == channel.last[0], order, op, d))
        if not options:
            return
        *_, op, d = min(options)
        device = self.devices[d]
        channel.busy, channel.last = True, (d, op.kind)
        if op.kind == "O":
            device.resident[op.stage].popleft()
            self.gone.add((op.stage, op.microbatch))
            device.host_room -= self._moved(op.stage)
        else:
            heappop(device.away)
        self._start(op, d)

    def _end_copy(self, op: Op, d: int) -> set[int]:
        device, activation = self.devices[d], (op.stage, op.microbatch)
        (channel,) = (c for c in self.channels_of[d] if (d, op.kind) in c.serves)
        channel.busy = False
        if op.kind == "O":
            heappush(device.away, (device.place[Op("B", *activation)], activation))
        else:
            self.gone.remove(activation)
            device.host_room += self._moved(op.stage)
        return {other for other, _ in channel.serves}

    def _moved(self, s: int) -> int:
        return -self.change[s, "O"]

    def _next_offload(self, d: int) -> tuple[bool, int, Op] | None:
        """The resident activation whose B is furthest away; pressing where the next op has no room."""
        device, op = self.devices[d], self.devices[d].upcoming
        pressing = op is not None and self._lacks_room(device, op)
        heads = [
            (-device.place[Op("B", s, stay[0])], Op("O", s, stay[0]))
            for s, stay in device.resident.items()
            if stay and self._moved(s) <= device.host_room and (pressing or device.next < self.due[s, stay[0]])
        ]
        return (pressing, *min(heads)) if heads else None

    def _next_reload(self, d: int) -> tuple[bool, int, Op] | None:
        """The activation away whose B comes first, if it is due and has room; pressing where its B is next."""
        device = self.devices[d]
        if not device.away:
            return None
        place, activation = device.away[0]
        if device.next < self.due[activation] or not self._leaves_room(device, activation[0], place):
            return None
        return place == device.next, place, Op("R", *activation)

    def _leaves_room(self, device: _Device, s: int, place: int) -> bool:
        """Whether all ops up to the B at `place` would fit beside its activation, though nothing else left."""
        room = device.room - self._moved(s)
        if room < 0:
            return False
        for op in device.order[device.next : place + 1]:
            if self.most[op.stage, op.kind] > room:
                return False
            room -= self.change[op.stage, op.kind]
        return True


def _channels(problem: Problem) -> Iterator[_Channel]:
    for group in problem.channel_groups:
        for kinds in ("O", "R") if problem.copy_channels.duplex else ("OR",):
            yield _Channel([(d, kind) for d in group for kind in kinds])
