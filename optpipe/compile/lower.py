"""Lowering of schedules to programs, by passes: messages, fused backwards, gradient reductions, evaluation.

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

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from optpipe.compile.check import check_program
from optpipe.compile.events import Key, Rules, with_events
from optpipe.compile.memory import action_effect
from optpipe.compile.offload import HostPlan, insert_releases, plan_slabs, reload_begins_us
from optpipe.compile.program import SENDS, Action, Program, matching_receive, matching_send
from optpipe.memory import Times
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate

Entry = tuple[float, int, str, int, int]
"""A node with what it is sorted by: its time in us; compute before messages before offloads before reloads; its key."""

_COMPUTE, _MESSAGE, _OFFLOAD, _RELOAD = range(4)


@dataclass(frozen=True)
class Plan:
    """What is lowered: orders with waits, and the planned times that decide what the orders leave open.

    `begin_us` gives a reload that had better begin later than planned its own time (`optpipe.compile.offload`),
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

    There is no cycle: the orders can run, and so can they with the waits that planned times allow.
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


def compile_schedule(schedule: Schedule, *, reduce_gradients: bool = False) -> Program:
    """Compile a schedule to a checked program.

    Only orders and waits of the schedule are used; times are simulated anew from its problem. With `reduce_gradients`
    each stage has a REDUCE once its gradients are complete. Raises OrderError where an op is missing, repeated or
    misplaced, DeadlockError where ops wait for one another in a cycle, and BudgetError where the program would hold
    more than a budget of the problem.
    """
    problem = schedule.problem
    simulation = simulate(problem, schedule.orders)  # refuses every order that cannot run
    spans = zip(simulation.start_us.tolist(), simulation.end_us.tolist(), strict=True)
    times = dict(zip(simulation.ops, spans, strict=True))
    host = plan_slabs(problem, times)
    orders = _with_slab_waits(schedule.orders, host)
    placement = tuple(stage.device for stage in problem.stages)
    plan = Plan(placement, orders, times, reload_begins_us(orders, times), host.slab_of)
    program = Program(problem.microbatches, placement, insert_releases(lower(plan)), host.slabs)
    if reduce_gradients:
        program = insert_reduces(program)
    program = with_events(program)
    check_program(program, problem)
    return program


def compile_forward(placement: Sequence[int], microbatches: int, devices: int | None = None) -> Program:
    """A checked program of forwards alone: `placement[s]` is the device of stage s.

    `devices` is their number, where more are meant than the placement names.
    """
    count = max(placement) + 1 if devices is None else devices
    program = with_events(
        Program(microbatches, tuple(placement), forward_lists(placement, microbatches, count), ((),) * count)
    )
    check_program(program)
    return program


def _with_slab_waits(orders: Orders, host: HostPlan) -> Orders:
    waits = {op: list(others) for op, others in orders.waits.items()}
    for offload, reload in host.waits.items():
        waits.setdefault(offload, []).append(reload)
    return replace(orders, waits=waits)


def forward_lists(placement: Sequence[int], microbatches: int, devices: int) -> tuple[tuple[Action, ...], ...]:
    """One list a device, in waves: wave k holds F of every stage s and microbatch i with s + i = k.

    As in lowering there is one global sequence, and each message is one entry of it, right after the F that makes
    it. A forward needs one of the wave before, so the sequence is a way to run the lists, whatever the placement.
    Within a wave earlier stages come first: a receive is issued before the forward that runs while its message comes.
    """
    lists: list[list[Action]] = [[] for _ in range(devices)]
    for wave in range(len(placement) + microbatches - 1):
        for s in range(max(0, wave - microbatches + 1), min(len(placement), wave + 1)):
            home, i = placement[s], wave - s
            lists[home].append(Action("F", s, i))
            if s + 1 < len(placement) and placement[s + 1] != home:
                peer = placement[s + 1]
                lists[home].append(Action("SEND_F", s, i, peer=peer))
                lists[peer].append(Action("RECV_F", s + 1, i, peer=home))
    return tuple(map(tuple, lists))


def fuse_adjacent(program: Program, problem: Problem, stages: Collection[int] | None = None) -> Program:
    """Turn B and W of one stage and microbatch into BW where nothing else is on the compute stream between them.

    In `stages` alone, where given. The order of everything else stays; the gradient that B sends on leaves after BW.
    A pair stays as it is if an offload begins between B and W because B is over, or if the workspace of BW does not
    fit into the budget of its device.
    """
    pairs = {
        pair
        for d, actions in enumerate(program.devices)
        for pair in _pairs(actions, problem, problem.devices[d].memory_bytes)
        if stages is None or pair[0] in stages
    }
    return with_events(replace(program, devices=tuple(tuple(_fused(actions, pairs)) for actions in program.devices)))


def _pairs(actions: Sequence[Action], problem: Problem, budget: int | None) -> Iterator[tuple[int, int]]:
    """Stage and microbatch of what can be fused. A pair holds before and after what BW holds there."""
    for level, (before, *between, after) in _on_compute_stream(actions, problem):
        stage, b = problem.stages[after.stage], Op("B", *after[1:3])
        side_by_side = after.kind == "W" and before.key == b
        fits = budget is None or level + action_effect(stage, "BW").at_start <= budget
        if side_by_side and fits and not any(a.kind == "O" and b in a.waits for a in between):
            yield after.stage, after.microbatch


def _on_compute_stream(actions: Sequence[Action], problem: Problem) -> Iterator[tuple[int, Sequence[Action]]]:
    """Neighbours on the compute stream with what is issued between them, and the bytes held before the first."""
    places = [k for k, action in enumerate(actions) if action.stream == "compute"]
    level = 0
    for first, last in pairwise(places):
        yield level, actions[first : last + 1]
        level += sum(action_effect(problem.stages[actions[first].stage], actions[first].kind))


def _fused(actions: Sequence[Action], pairs: Collection[tuple[int, int]]) -> Iterator[Action]:
    for action in actions:
        key = _renamed(action.key, pairs)
        if action.kind != "W" or key == action.key:
            yield action._replace(kind=key.kind, waits=tuple(_renamed(wait, pairs) for wait in action.waits))


def _renamed(op: Op, pairs: Collection[tuple[int, int]]) -> Op:
    return Op("BW", *op[1:]) if op.kind in ("B", "W") and op[1:] in pairs else op


def insert_reduces(program: Program) -> Program:
    """REDUCE of every stage as soon as its last W or BW is issued, while the device goes on with its other stages.

    Replicas of a pipeline run equal lists, so all of them reduce a device's stages in the same order.
    """
    return replace(program, devices=tuple(tuple(_with_reduces(actions)) for actions in program.devices))


def _with_reduces(actions: Sequence[Action]) -> Iterator[Action]:
    last = {action.stage: k for k, action in enumerate(actions) if action.kind in ("W", "BW")}
    for k, action in enumerate(actions):
        yield action
        if last.get(action.stage) == k:
            yield Action("REDUCE", action.stage, 0)
