"""Lowering: three streams a device, and messages between devices, become one list of actions a device.

All devices' actions are put in one global sequence by planned time, and each device's list is its part of that
sequence. Every message is one entry of it, at the planned end of the op that produces it, and becomes a send in one
list and a receive in another. Hence all devices agree on the order of all messages, messages between two devices are
first in, first out, and even if every send waited for its receive, the lists could not deadlock: the global
sequence itself is a way to run them.

Compute ops stand at their planned end, so a receive is issued before the op that is planned to run while the message
arrives, and a copy before the op beside which it is planned. What a receive or a copy needs of the compute stream
(memory is allocated there) is then over by its planned start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from optpipe.compile.actions import SENDS, Action, matching_receive, matching_send
from optpipe.compile.dependencies import Key, Rules
from optpipe.orders import Op, Orders
from optpipe.waits import Times

Entry = tuple[float, int, str, int, int]
"""A node with what it is sorted by: its time in us; compute before messages before offloads before reloads; its key."""

_COMPUTE, _MESSAGE, _OFFLOAD, _RELOAD = range(4)


@dataclass(frozen=True)
class Plan:
    """What is lowered: orders with waits, and the planned times that decide what the orders leave open.

    `begin_us` gives a reload that had better begin later than planned its own time (`optpipe.compile.copies`),
    `slab_of` each offloaded (stage, microbatch) its slab.
    """

    placement: tuple[int, ...]
    orders: Orders
    times: Times
    begin_us: Mapping[Op, float]
    slab_of: Mapping[tuple[int, int], int]


def lower(plan: Plan) -> tuple[tuple[Action, ...], ...]:
    """One list a device, in the order in which actions are issued, with messages and PREPARE but without RELEASE.

    `waits` of an action are those of the plan; a reload's stand on its PREPARE, which is right before it.
    """
    graph = _Graph(plan)
    lists: list[list[Action]] = [[] for _ in plan.orders.devices]
    for key in _each_after_its_needs(sorted(graph.entries()), graph.needs):
        for device, action in graph.actions(Op(*key)):
            lists[device].append(action)
    return tuple(map(tuple, lists))


class _Graph:
    """Ops and messages as nodes (a message is represented by its send, a reload stands for its PREPARE too)."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._placement = plan, plan.placement
        self._rules = Rules(plan.placement, plan.times)
        streams = [ops for device in plan.orders.devices for ops in device.streams()]
        self._before: Mapping[Key, Key] = {later: earlier for ops in streams for earlier, later in pairwise(ops)}

    def entries(self) -> Iterator[Entry]:
        """Every node, with what it is sorted by."""
        last = len(self._placement) - 1
        for op, (start_us, end_us) in self._plan.times.items():
            kind, s, i = op
            if kind in ("O", "R"):
                yield self._plan.begin_us.get(op, start_us), _OFFLOAD if kind == "O" else _RELOAD, kind, s, i
                continue
            yield end_us, _COMPUTE, kind, s, i
            if kind == "F" and s < last and self._rules.crosses(s):
                yield end_us, _MESSAGE, "SEND_F", s, i
            elif kind in ("B", "BW") and s > 0 and self._rules.crosses(s - 1):
                yield end_us, _MESSAGE, "SEND_B", s, i

    def needs(self, node: Key) -> Iterator[Key]:
        """The nodes that must come before one."""
        if node in self._before:
            yield self._before[node]
        if node[0] == "R":
            yield ("O", *node[1:])
        else:
            for need in self._rules.needs(node):
                yield matching_send(Op(*need)) if need[0].startswith("RECV") else need
        yield from self._plan.orders.waits.get(node, ())  # type: ignore[call-overload]

    def actions(self, node: Op) -> Iterator[tuple[int, Action]]:
        """The entries in the lists, each with its device, that a node becomes."""
        home = self._placement[node.stage]
        waits = tuple(self._plan.orders.waits.get(node, ()))
        if node.kind in SENDS:
            receive = matching_receive(node)
            peer = self._placement[receive.stage]
            yield home, Action(*node, peer=peer)
            yield peer, Action(*receive, peer=home)
        elif node.kind == "R":
            yield home, Action("PREPARE", node.stage, node.microbatch, waits=waits)
            yield home, Action(*node)
        else:
            slab = self._plan.slab_of[node[1:]] if node.kind == "O" else None
            yield home, Action(*node, waits=waits, slab=slab)


def _each_after_its_needs(entries: Iterable[Entry], needs: Callable[[Key], Iterable[Key]]) -> list[Key]:
    """The nodes in the order of their entries; where one needs a later one, that comes right before it.

    There is no circle: the orders can run, and so can they with the waits that planned times allow.
    """
    sequence: dict[Key, None] = {}
    for entry in entries:
        pending = [entry[2:]]
        while pending:
            node = pending[-1]
            missing = [] if node in sequence else [need for need in needs(node) if need not in sequence]
            pending += missing
            if not missing:
                sequence[pending.pop()] = None
    return list(sequence)
