"""Lowering: three streams a device, and messages between devices, become one list of actions a device.

All devices' actions are put in one global sequence by planned time, and each device's list is its part of that
sequence. Every message is one entry of it, at the planned end of the op that produces it, and becomes a send in one
list and a receive in another. Hence all devices agree on the order of all messages, messages between two devices are
first in, first out, and even if every send waited for its receive, the lists could not deadlock: the global
sequence itself is a way to run them.

In one list an op that is planned to overlap another runs after it. Ops come in the order of their planned starts, so
at each start everything planned to be released by then is released, and memory never exceeds the plan.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from optpipe.compile.actions import SENDS, Action, Program, matching_receive, matching_send
from optpipe.compile.check import check_program
from optpipe.compile.dependencies import Rules
from optpipe.orders import Op
from optpipe.schedule import Schedule
from optpipe.simulate import simulate

Priority = tuple[float, int, str, int, int]
"""Planned time, then messages and offloads before compute before reloads; the rest makes the sequence unique."""

_RANK = {"SEND_F": 0, "SEND_B": 0, "O": 1, "R": 3}
_COMPUTE_RANK = 2


def compile_schedule(schedule: Schedule) -> Program:
    """Lower a schedule to a checked program.

    Only order, waits and relative planned times of the schedule are used. Raises OrderError where an op is missing,
    repeated or misplaced, and DeadlockError where ops wait for one another in a circle.
    """
    simulate(schedule.problem, schedule.orders)  # refuses every order that cannot run
    placement = tuple(stage.device for stage in schedule.problem.stages)
    lowering = _Lowering(schedule, Rules(placement, _planned(schedule)))
    program = Program(schedule.problem.microbatches, placement, lowering.device_lists())
    check_program(program)
    return program


def _planned(schedule: Schedule) -> dict[Op, tuple[float, float]]:
    return {
        op.key: (op.start_us, op.end_us) for device in schedule.devices for _, ops in device.streams() for op in ops
    }


@dataclass
class _Lowering:
    """The graph of ops and messages (a message is represented by its send) and their priorities."""

    schedule: Schedule
    rules: Rules
    planned: Mapping[Op, tuple[float, float]] = field(init=False)
    waits: Mapping[Op, Sequence[Op]] = field(init=False)

    def __post_init__(self) -> None:
        self.planned = _planned(self.schedule)
        self.waits = self.schedule.orders.waits

    def device_lists(self) -> tuple[tuple[Action, ...], ...]:
        lists: list[list[Action]] = [[] for _ in self.schedule.devices]
        for key in self._sequence():
            home = self.rules.placement[key.stage]
            if key.kind in SENDS:
                receive = matching_receive(key)
                peer = self.rules.placement[receive.stage]
                lists[home].append(Action(*key, peer=peer))
                lists[peer].append(Action(*receive, peer=home))
            else:
                lists[home].append(Action(*key, waits=tuple(self.waits.get(key, ()))))
        return tuple(tuple(actions) for actions in lists)

    def _sequence(self) -> list[Op]:
        """Ops and messages by priority, each after all that it needs."""
        nodes = [*self.planned, *self._messages()]
        before = {node: set(self._before(node)) for node in nodes}
        for earlier, later in self._stream_order():
            before[later].add(earlier)
        return _by_priority(before, {node: self._priority(node) for node in nodes})

    def _messages(self) -> Iterable[Op]:
        last = len(self.rules.placement) - 1
        for kind, s, i in self.planned:
            if kind == "F" and s < last and self.rules.crosses(s):
                yield Op("SEND_F", s, i)
            if kind in ("B", "BW") and s > 0 and self.rules.crosses(s - 1):
                yield Op("SEND_B", s, i)

    def _before(self, node: Op) -> Iterable[Op]:
        for need in self.rules.needs(node):
            yield matching_send(need) if need.kind.startswith("RECV") else need
        yield from self.waits.get(node, ())

    def _stream_order(self) -> Iterable[tuple[Op, Op]]:
        for device in self.schedule.orders.devices:
            for ops in device.streams():
                yield from pairwise(ops)

    def _priority(self, node: Op) -> Priority:
        if node.kind in SENDS:
            (producer,) = self.rules.needs(node)
            time_us = self.planned[producer][1]
        else:
            time_us = self.planned[node][0]
        return time_us, _RANK.get(node.kind, _COMPUTE_RANK), *node


def _by_priority(before: Mapping[Op, set[Op]], priority: Mapping[Op, Priority]) -> list[Op]:
    """A topological order that takes, among the nodes that may come next, the one with the least priority."""
    after: dict[Op, list[Op]] = defaultdict(list)
    missing = {node: len(needs) for node, needs in before.items()}
    for node, needs in before.items():
        for need in needs:
            after[need].append(node)
    ready = [(priority[node], node) for node, count in missing.items() if not count]
    heapq.heapify(ready)
    sequence = []
    while ready:
        _, node = heapq.heappop(ready)
        sequence.append(node)
        for follower in after[node]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (priority[follower], follower))
    assert len(sequence) == len(before), "simulate accepts no circle"
    return sequence
