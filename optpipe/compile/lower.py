"""Lowering of schedules to programs, by passes: messages, fused backwards, gradient reductions, evaluation.

The actions of all devices are put in one global sequence by planned time, and each device's list is its part of that
sequence. A message is one entry, at the planned end of the op that produces it, and becomes a send in one list and a
receive in another. Hence all devices agree on the order of all messages, messages between two devices are first in,
first out, and the lists cannot deadlock even if every send blocks until its receive: the global sequence is a valid
execution.

Compute ops are placed at their planned end, so a receive is issued before the op planned to run while the message
arrives, and a copy before the op planned to run concurrently. So the part of the compute stream that a receive or copy
needs (memory is allocated there) has ended by its planned start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from optpipe.compile.check import check_program
from optpipe.compile.events import Key, Rules, with_events
from optpipe.compile.memory import action_effect, unit_stage
from optpipe.compile.offload import insert_releases, plan_slabs, reload_begins_us
from optpipe.compile.program import EXCHANGES, SENDS, STREAM_OF_ACTION, Action, Program, matching_receive, matching_send
from optpipe.costs import Effect
from optpipe.errors import InputError, Issue
from optpipe.kinds import BACKWARDS, COPIES, HALVES, LAST_BACKWARDS, WHOLE_BACKWARD
from optpipe.memory import Times
from optpipe.ops import Op, Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule, implied_modes
from optpipe.simulate import simulate
from optpipe.spread import VocabularyPasses, vocabulary_passes

Entry = tuple[float, int, str, int, int]
"""A node by its sort key: time in us; compute, messages, offloads, reloads in this order; kind, stage, microbatch."""

_COMPUTE, _MESSAGE, _OFFLOAD, _RELOAD = range(4)


@dataclass(frozen=True)
class Plan:
    """Input of lowering: orders with waits, and the planned times that decide what the orders leave open.

    `begin_us` holds the start of each reload that is postponed (`optpipe.compile.offload`), `slab_of` the slab of each
    offloaded (stage, microbatch).
    """

    placement: tuple[int, ...]
    orders: Orders
    times: Times
    begin_us: Mapping[Op, float]
    slab_of: Mapping[tuple[int, int], int]
    vocabulary: VocabularyPasses | None = None


def lower(plan: Plan) -> tuple[tuple[Action, ...], ...]:
    """Lower a plan to one list per device, in issue order, with messages and PREPARE but without RELEASE.

    `waits` of an action are those of the plan; the waits of a reload are on its PREPARE, which is right before it.
    """
    graph = _Graph(plan)
    lists: list[list[Action]] = [[] for _ in plan.orders.devices]
    sequence: set[Key] = set()
    for entry in sorted(graph.entries()):
        # Depth first: nodes that this one needs and that come later are moved right before it. There is no cycle: the
        # orders can run, also with the waits that planned times allow.
        pending = [entry[2:]]
        while pending:
            node = pending[-1]
            missing = [] if node in sequence else [need for need in graph.needs(node) if need not in sequence]
            pending += missing
            if missing:
                continue
            if pending.pop() not in sequence:
                sequence.add(node)
                for device, action in graph.actions(Op(*node)):
                    lists[device].append(action)
    return tuple(map(tuple, lists))


class _Graph:
    """Ops and messages as nodes: the send stands for a message, a reload for its PREPARE, device 0 for an exchange."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._placement = plan, plan.placement
        self._rules = Rules(plan.placement, plan.times, vocabulary=plan.vocabulary)
        streams = [ops for device in plan.orders.devices for ops in device.streams()]
        self._before: Mapping[Key, Key] = {later: earlier for ops in streams for earlier, later in pairwise(ops)}

    def entries(self) -> Iterator[Entry]:
        """Every node with its sort key."""
        last = len(self._placement) - 1
        first = min((op.stage for op in self._plan.times if op.kind in BACKWARDS), default=0)
        exchanges: dict[tuple[str, int], float] = {}
        after = self._exchanges_after()
        for op, (start_us, end_us) in self._plan.times.items():
            kind, s, i = op
            if kind != "F" or s == last:
                for exchange in after.get(kind, ()):
                    exchanges[exchange, i] = max(end_us, exchanges.get((exchange, i), 0.0))
            if kind in COPIES:
                yield self._plan.begin_us.get(op, start_us), _OFFLOAD if kind == "O" else _RELOAD, kind, s, i
                continue
            yield end_us, _COMPUTE, kind, s, i
            if kind == "F" and s < last and self._rules.crosses(s):
                yield end_us, _MESSAGE, "SEND_F", s, i
            elif kind in BACKWARDS and s > first and self._rules.crosses(s - 1):
                yield end_us, _MESSAGE, "SEND_B", s, i
        for (exchange, i), end_us in exchanges.items():
            yield end_us, _MESSAGE, exchange, 0, i

    def _exchanges_after(self) -> dict[str, Sequence[str]]:
        """Exchanges that follow the last stage's forward and the passes of a vocabulary layer."""
        if self._plan.vocabulary is None:
            return {}
        logits, weights, barriers = self._plan.vocabulary
        broadcast, gather, reduce = EXCHANGES
        if barriers == 1:
            return {"F": [broadcast], logits: [gather, reduce]}
        return {"F": [broadcast], logits: [gather], weights: [reduce]}

    def needs(self, node: Key) -> Iterator[Key]:
        """Nodes that must come before a node."""
        if node in self._before:
            yield self._before[node]
        if node[0] == "R":
            yield ("O", *node[1:])
        else:
            devices = len(self._plan.orders.devices) if node[0] in EXCHANGES else 0
            keys = [(node[0], d, node[2]) for d in range(devices)] or [node]
            for need in (need for key in keys for need in self._rules.needs(key)):
                if need[0] in EXCHANGES:
                    yield need[0], 0, need[2]
                else:
                    yield matching_send(Op(*need)) if need[0].startswith("RECV") else need
        yield from self._plan.orders.waits.get(node, ())  # type: ignore[call-overload]

    def actions(self, node: Op) -> Iterator[tuple[int, Action]]:
        """Actions of a node, each with its device."""
        waits = tuple(self._plan.orders.waits.get(node, ()))
        if self._plan.vocabulary and node.kind in self._plan.vocabulary[:2]:
            yield node.stage, Action(*node, waits=waits)
            return
        if node.kind in EXCHANGES:
            for d in range(len(self._plan.orders.devices)):
                yield d, Action(node.kind, d, node.microbatch)
            return
        home = self._placement[node.stage]
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


def compile_schedule(
    schedule: Schedule,
    *,
    reduce_gradients: bool = False,
    gather_parameters: bool = False,
    reduce_every: int | None = None,
) -> Program:
    """Compile a schedule to a checked program.

    Only orders and waits of the schedule are used; times are simulated. With `reduce_gradients` each stage has a REDUCE
    when its gradients are complete, and with `reduce_every` also a REDUCE_PART after the weight gradients of so many
    microbatches; with `gather_parameters` it has a GATHER before its first F. Raises OrderError if an op is missing,
    repeated or misplaced, DeadlockError if ops wait for one another in a cycle, BudgetError if the program would exceed
    a budget of the problem, InputError if spread passes are not those of a vocabulary layer, or with replicas.
    """
    problem = schedule.problem
    vocabulary = _vocabulary(problem, replicas=reduce_gradients or gather_parameters)
    simulation = simulate(problem, schedule.orders)  # raises if the orders cannot run
    spans = zip(simulation.start_us.tolist(), simulation.end_us.tolist(), strict=True)
    times = dict(zip(simulation.ops, spans, strict=True))
    host = plan_slabs(problem, times, simulation.modes)
    waits = {op: list(others) for op, others in schedule.orders.waits.items()}
    for offload, reload in host.waits.items():
        waits.setdefault(offload, []).append(reload)
    orders = replace(schedule.orders, waits=waits)
    placement = tuple(stage.device for stage in problem.stages)
    plan = Plan(placement, orders, times, reload_begins_us(orders, times), host.slab_of, vocabulary)
    lists = insert_releases(lower(plan))
    modes, slices = _mode_names(problem, orders), problem.slice_count
    blocks = dict(orders.blocks)
    program = Program(problem.microbatches, placement, lists, host.slabs, modes, slices, blocks, vocabulary)
    if reduce_gradients:
        program = _insert_reduces(program, (reduce_every or program.microbatches) * slices)
    if gather_parameters:
        program = _insert_gathers(program)
    program = with_events(program)
    check_program(program, problem)
    return program


def _vocabulary(problem: Problem, *, replicas: bool) -> VocabularyPasses | None:
    """Passes of the problem as those of a vocabulary layer. Raises InputError for others, and with replicas."""
    if not problem.spread and not problem.gates:
        return None
    found = vocabulary_passes(problem.spread or (), problem.gates or (), problem.stages)
    names = ", ".join(problem.pass_names) or "none"
    if found is None:
        detail = (
            f"has the passes {names}, but only those of a vocabulary layer can run: one after F of the last stage, one "
            "after that pass, both on every device, and a gate of the last stage's B. Maybe see docs/train.md."
        )
        raise InputError([Issue(("problem", "spread"), "not_vocabulary", detail)])
    for name in found[:2]:
        if name in STREAM_OF_ACTION:
            detail = f"has the pass {name!r}, which is also an action of programs. Maybe call it S or T."
            raise InputError([Issue(("problem", "spread"), "action_name", detail)])
    if replicas:
        detail = (
            f"has the passes {names}, whose gradients are not summed over replicas. Maybe train one replica "
            "(--data-parallel 1) with 'optpipe train'."
        )
        raise InputError([Issue(("problem", "spread"), "replicas", detail)])
    return found


def _mode_names(problem: Problem, orders: Orders) -> dict[tuple[int, int], str]:
    """Name of the mode of each (stage, microbatch) that is neither kept nor offloaded whole."""
    if orders.modes is None:
        return {}
    implied = implied_modes(problem, [device.offload for device in orders.devices])
    named = np.argwhere(orders.modes != implied).tolist()
    return {(s, i): problem.stages[s].choices[orders.modes[s, i]].name for s, i in named}


def compile_forward(
    placement: Sequence[int],
    microbatches: int,
    devices: int | None = None,
    slices: int = 1,
    vocabulary: VocabularyPasses | None = None,
) -> Program:
    """Compile a checked program of forwards only; `placement[s]` is the device of stage s.

    `devices` is the number of devices, by default those that the placement uses. Lists are in waves: wave k holds F of
    every stage s and unit (microbatch, or one of its `slices`) i with s + i = k. As in lowering there is one global
    sequence, and each message is one entry, right after the F that makes it. A forward needs only the previous wave, so
    the sequence is a valid execution for any placement. Within a wave earlier stages come first, so a receive is issued
    before the forward that runs while the message arrives.

    With a `vocabulary` layer on all devices both passes of a microbatch end the wave of its last F, as in Algorithm 1:
    the second finds the loss where it would begin the backward.
    """
    count = max(placement) + 1 if devices is None else devices
    units = microbatches * slices
    lists: list[list[Action]] = [[] for _ in range(count)]
    for wave in range(len(placement) + units - 1):
        for s in range(max(0, wave - units + 1), min(len(placement), wave + 1)):
            home, i = placement[s], wave - s
            lists[home].append(Action("F", s, i))
            if s + 1 < len(placement) and placement[s + 1] != home:
                peer = placement[s + 1]
                lists[home].append(Action("SEND_F", s, i, peer=peer))
                lists[peer].append(Action("RECV_F", s + 1, i, peer=home))
        if vocabulary is not None and wave >= len(placement) - 1:
            broadcast, gather, _ = EXCHANGES
            for kind in (broadcast, vocabulary.logits, gather, vocabulary.weights):
                for d, own in enumerate(lists):
                    own.append(Action(kind, d, wave - len(placement) + 1))
    if vocabulary is not None:
        vocabulary = vocabulary._replace(barriers=2)
    actions, slabs = tuple(map(tuple, lists)), ((),) * count
    program = with_events(Program(microbatches, tuple(placement), actions, slabs, slices=slices, vocabulary=vocabulary))
    check_program(program)
    return program


def fuse_adjacent(program: Program, problem: Problem, stages: Collection[int] | None = None) -> Program:
    """Fuse B and W of one stage and microbatch into BW (CB and W into CBW) if they are adjacent on the compute stream.

    Only in `stages`, if given. All other actions keep their order; the gradient that B sends on leaves after BW. A pair
    is not fused if an offload that waits for B starts between B and W, or if the workspace of BW does not fit into the
    budget of its device.
    """
    pairs = {
        (after.stage, after.microbatch): WHOLE_BACKWARD[before.kind]
        for d in range(len(program.devices))
        for before, after in _fusible_pairs(program, d, problem)
        if stages is None or after.stage in stages
    }

    def fused(op: Op) -> Op:
        return Op(pairs[op[1:]], *op[1:]) if op.kind in HALVES and op[1:] in pairs else op

    devices = []
    for actions in program.devices:
        kept = (action for action in actions if action.kind != "W" or action[1:3] not in pairs)
        devices.append(tuple(a._replace(kind=fused(a.key).kind, waits=tuple(map(fused, a.waits))) for a in kept))
    return with_events(replace(program, devices=tuple(devices)))


def _fusible_pairs(program: Program, device: int, problem: Problem) -> Iterator[tuple[Action, Action]]:
    """Pairs of B or CB and W that can be fused. They hold before and after them what BW or CBW holds there."""
    actions, budget = program.devices[device], problem.devices[device].memory_bytes

    def effect(action: Action, kind: str) -> Effect:
        stage, mode = unit_stage(program, problem, action.stage, action.microbatch)
        return action_effect(stage, kind, mode)

    level = 0  # bytes held before the first of two neighbours on the compute stream
    for first, last in pairwise(k for k, action in enumerate(actions) if action.stream == "compute"):
        before, between, after = actions[first], actions[first + 1 : last], actions[last]
        adjacent = after.kind == "W" and before.kind in WHOLE_BACKWARD and before[1:3] == after[1:3]
        fits = not adjacent or budget is None or level + effect(before, WHOLE_BACKWARD[before.kind]).at_start <= budget
        if adjacent and fits and not any(a.kind == "O" and before.key in a.waits for a in between):
            yield before, after
        level += sum(effect(before, before.kind))


def _insert_reduces(program: Program, every: int) -> Program:
    """Insert REDUCE of every stage right after its last W, BW or CBW, while the device runs its other stages.

    After every `every` of the earlier ones there is a REDUCE_PART. Replicas of a pipeline run equal lists, so all of
    them reduce a device's stages in the same order.
    """
    devices = []
    for actions in program.devices:
        done: Counter[int] = Counter()
        reduced: list[Action] = []
        for action in actions:
            reduced.append(action)
            if action.kind in LAST_BACKWARDS:
                done[action.stage] += 1
                if done[action.stage] == program.units:
                    reduced.append(Action("REDUCE", action.stage, 0))
                elif done[action.stage] % every == 0:
                    reduced.append(Action("REDUCE_PART", action.stage, action.microbatch))
        devices.append(tuple(reduced))
    return replace(program, devices=tuple(devices))


def _insert_gathers(program: Program) -> Program:
    """Insert GATHER of every stage before its first F: while the device waits for its first message."""
    devices = []
    for actions in program.devices:
        first = {action.stage: k for k, action in reversed([*enumerate(actions)]) if action.kind == "F"}
        gathered: list[Action] = []
        for k, action in enumerate(actions):
            if first.get(action.stage) == k:
                gathered.append(Action("GATHER", action.stage, 0))
            gathered.append(action)
        devices.append(tuple(gathered))
    return replace(program, devices=tuple(devices))
