"""Executor of one device: actions bound to stages, slabs and channels, run in program order.

The overhead per action is the host's cost of a schedule, so actions are bound once: at run time no name is looked up
and nothing is allocated per action. Messages pass through slots, and each call holds its stage, microbatch and slots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from optpipe.compile.program import RECEIVES, Action, Message, Program, excerpt
from optpipe.errors import RunFailedError, TrainingError
from optpipe.kinds import BACKWARDS, covering
from optpipe.mode_names import IN_LOW_PRECISION
from optpipe.ops import Op
from optpipe.runtime.activations import HostSlabs
from optpipe.runtime.channel import Channel, Direction, TreeReceipt, open_channel
from optpipe.runtime.collectives import Collectives
from optpipe.runtime.messages import Spec, Tree
from optpipe.runtime.parts import InParts, run_as_block, run_whole
from optpipe.runtime.recorder import MemoryMeter, Recorder
from optpipe.runtime.stage import Stage
from optpipe.runtime.streams import Streams, Work
from optpipe.runtime.transport import Transport, is_peer_error
from optpipe.runtime.vocabulary import VocabularyShard

Reducer = Callable[[], None]
"""Sums the gradients of one stage over its replicas."""

_NOTHING = object()
"""Content of an empty slot; None is a message, the gradient of a tensor without one."""


class MessageSlot:
    """Holder of one message between the action that makes it and the one that uses it."""

    __slots__ = ("receipt", "tree")

    def __init__(self) -> None:
        self.tree: Tree = _NOTHING
        self.receipt: TreeReceipt | None = None

    def take(self) -> Tree:
        """Remove and return the message."""
        tree = self.tree
        assert tree is not _NOTHING, "the message was not made yet"
        self.tree = _NOTHING
        return tree

    def arrive(self) -> None:
        """Wait for the message of the posted receive."""
        assert self.receipt is not None, "no receive was posted for the message"
        self.tree = self.receipt.wait()
        self.receipt = None

    def expect(self, receipt: TreeReceipt) -> None:
        """Hold the receipt of what is to come."""
        self.receipt = receipt

    def clear(self) -> None:
        """Drop message and receipt, after an error."""
        self.tree, self.receipt = _NOTHING, None


@dataclass
class Batch:
    """Data of a step, one entry per microbatch; `losses` are scalars to write to.

    `messages`: the specs at all boundaries for each microbatch, where these differ.
    """

    inputs: Sequence[Tree] = ()
    targets: Sequence[Tree] = ()
    losses: Sequence[Tensor] = ()
    messages: Sequence[Sequence[Spec]] = ()


@dataclass(frozen=True)
class BoundAction:
    """An action as calls. `arrival` runs before `work`: it enters the stream and waits for events and the message.

    The action must not start before the message of `gate` has arrived. `counted`: its allocations count as device
    memory. `in_block`: the work where both ops of a block run part by part, all of it with the second; None: as `work`.
    """

    action: Action
    arrival: Work | None
    work: Work
    gate: MessageSlot | None
    counted: bool
    in_block: Work | None = None

    @property
    def call(self) -> Work:
        """Arrival and work as one call."""
        return _in_sequence(self.arrival, self.in_block or self.work)


@dataclass
class DeviceParts:
    """Objects that the actions of one device work on. `evaluates`: forwards keep nothing for a backward.

    `specs` are those of the messages over each boundary; None: they are in the batch, by microbatch. `shard` and
    `collectives`: of a vocabulary layer on all devices; the last spec is then that of the last stage's activation.
    """

    program: Program
    device: int
    stages: Mapping[int, Stage]
    specs: Sequence[Spec] | None
    transport: Transport
    streams: Streams
    slabs: HostSlabs
    reducers: Mapping[int, Reducer]
    batch: Batch = field(default_factory=Batch)
    evaluates: bool = False
    shard: VocabularyShard | None = None
    collectives: Collectives | None = None


class ActionBinder:
    """Binder of the actions of one device: turns each into calls on stages, slabs and channels."""

    def __init__(self, parts: DeviceParts) -> None:
        self._parts = parts
        self._last_stage = len(parts.program.placement) - 1
        self._boundaries = self._last_stage + (parts.shard is not None)
        self._slots: dict[Message, MessageSlot] = {}
        self._figures: dict[int, MessageSlot] = defaultdict(MessageSlot)
        actions = parts.program.devices[parts.device]
        self._fused = {(action.stage, action.microbatch) for action in actions if action.kind in covering("B", "W")}
        self._blocks = self._blocks_in_parts()
        self._in_parts = {op[1:] for pair in self._blocks.items() for op in pair}
        self._with_backward = frozenset(self._blocks.values())
        self._passes: dict[Op, Callable[[], InParts[None]]] = {}
        self._work: Mapping[str, Callable[[Action], Work]] = {
            "F": self._forward,
            "B": lambda action: self._backward(action, self._stage(action).backward_input),
            "BW": lambda action: self._backward(action, self._stage(action).backward),
            "W": lambda action: partial(self._stage(action).backward_weight, action.microbatch),
            "C": lambda action: partial(self._stage(action).recompute, action.microbatch),
            "CB": lambda action: self._backward(action, self._stage(action).recompute_and_backward_input),
            "CBW": lambda action: self._backward(action, self._stage(action).recompute_and_backward),
            "O": self._offload,
            "RELEASE": lambda action: partial(self._stage(action).free, action.microbatch),
            "PREPARE": lambda action: partial(self._stage(action).allocate, action.microbatch),
            "R": lambda action: partial(self._stage(action).copy_in, action.microbatch),
            "GATHER": lambda action: self._stage(action).gather,
            "REDUCE_PART": self._reduce,
            "REDUCE": self._reduce,
            "SEND_F": self._send,
            "SEND_B": self._send,
            "RECV_F": self._receive,
            "RECV_B": self._receive,
            "BROADCAST": self._broadcast,
            "ALL_GATHER": self._all_gather,
            "REDUCE_INPUT": self._reduce_input,
        }
        if vocabulary := parts.program.vocabulary:
            self._work |= {vocabulary.logits: self._make_logits, vocabulary.weights: self._add_weight_gradient}

    def bind(self) -> tuple[list[BoundAction], list[MessageSlot]]:
        """The device's list of actions, bound, and all of their slots."""
        actions = [self._bound(action) for action in self._parts.program.devices[self._parts.device]]
        return actions, [*self._slots.values(), *self._figures.values()]

    def _bound(self, action: Action) -> BoundAction:
        streams, program = self._parts.streams, self._parts.program
        work = streams.issuing(action, self._work[action.kind](action), action.key in program.awaited)
        gate = self._gate(action)
        arrival = streams.arrival(action)
        if gate is not None:
            arrival = _in_sequence(arrival, gate.arrive)
        sends = ("O", "SEND_F", "SEND_B", "BROADCAST" if self._has_last else "REDUCE_INPUT")
        return BoundAction(action, arrival, work, gate, action.kind not in sends, self._in_block(action))

    def _blocks_in_parts(self) -> dict[Op, Op]:
        """The F of each block that runs part by part, by its backward: of stages that have parts, and kept.

        Nothing but receives stands between both ops, and no other stream waits for the F: it ends with the backward.
        """
        parts, program = self._parts, self._parts.program
        keys = [action.key for action in program.devices[parts.device] if action.kind not in RECEIVES]
        behind = dict(pairwise(keys))
        left = program.offloaded | program.recomputed | program.modes.keys()
        return {
            backward: forward
            for forward, backward in program.blocks.items()
            if behind.get(forward) == backward and forward not in program.awaited and not parts.evaluates
            if all(parts.stages[op.stage].parts and op[1:] not in left for op in (forward, backward))
        }

    def _in_block(self, action: Action) -> Work | None:
        """Work of an action that is an op of a block which runs part by part."""
        if action.key in self._with_backward:
            return _nothing
        if action.key not in self._blocks:
            return None
        backward, forward = self._passes[action.key], self._passes[self._blocks[action.key]]
        work = partial(_run_block, backward, forward)
        return self._parts.streams.issuing(action, work, action.key in self._parts.program.awaited)

    def _stage(self, action: Action) -> Stage:
        return self._parts.stages[action.stage]

    def _slot(self, direction: Direction, boundary: int, microbatch: int) -> MessageSlot | None:
        """Slot of a message; None beyond the first and last stage."""
        if not 0 <= boundary < self._boundaries:
            return None
        return self._slots.setdefault(Message(direction, boundary, microbatch), MessageSlot())

    def _used(self, action: Action) -> MessageSlot | None:
        """Slot of the message that a compute action uses."""
        if action.kind == "F":
            return self._slot("F", action.stage - 1, action.microbatch)
        return self._slot("B", action.stage, action.microbatch) if action.kind in BACKWARDS else None

    def _gate(self, action: Action) -> MessageSlot | None:
        """Slot of what comes from other devices and an action uses."""
        program, i = self._parts.program, action.microbatch
        if vocabulary := program.vocabulary:
            if action.kind == vocabulary.logits:
                return self._slot("F", self._last_stage, i)
            if action.kind == ("REDUCE_INPUT" if vocabulary.barriers == 1 else vocabulary.weights):
                return self._figures[i]
        if action.kind != "F" and action.kind not in BACKWARDS:
            return None
        boundary = action.stage - (action.kind == "F")
        received = 0 <= boundary < self._last_stage and program.crosses(boundary)
        return self._used(action) if received or boundary == self._last_stage else None

    @property
    def _has_last(self) -> bool:
        return self._parts.program.placement[self._last_stage] == self._parts.device

    def _forward(self, action: Action) -> Work:
        s, i, stage, batch = action.stage, action.microbatch, self._stage(action), self._parts.batch
        program = self._parts.program
        try:
            forward = stage.forward_of(program.modes.get((s, i)) if (s, i) in program.recomputed else None)
        except TrainingError as error:
            raise TrainingError(f"stages[{s}] {error}") from None
        if s < program.first_trained:
            forward = stage.forward_alone
        evaluate, evaluates = stage.evaluate, self._parts.evaluates
        used, made = self._used(action), self._slot("F", s, i)
        offloads, fused = (s, i) in program.offloaded, (s, i) in self._fused
        if (s, i) in self._in_parts:
            return self._part_by_part(action, partial(self._forward_in_parts, stage, i, fused, used, made))

        def work() -> None:
            received = used.take() if used is not None else batch.inputs[i]
            target = batch.targets[i] if made is None else None
            output = evaluate(i, received, target) if evaluates else forward(i, received, target, offloads, fused)
            if made is None:
                batch.losses[i].copy_(output)
            else:
                made.tree = output

        return work

    def _exchange(self) -> tuple[VocabularyShard, Collectives]:
        """Rows of this device and how devices exchange. Raises TrainingError where the pipeline was given none."""
        shard, collectives = self._parts.shard, self._parts.collectives
        if shard is None or collectives is None:
            raise TrainingError(
                "the schedule has the passes of a vocabulary layer on all devices, but the pipeline was given no rows "
                "of one. Maybe train with 'optpipe train'."
            )
        return shard, collectives

    def _broadcast(self, action: Action) -> Work:
        _, collectives = self._exchange()
        device, source = self._parts.device, self._parts.program.placement[self._last_stage]
        slot = self._boundary_slot("F", action)
        assert self._parts.specs is not None, "microbatches are of one shape"
        spec = self._parts.specs[self._last_stage]
        if device == source:
            return lambda: slot.expect(collectives.broadcast(device, source, slot.take(), spec))
        return lambda: slot.expect(collectives.broadcast(device, source, None, spec))

    def _make_logits(self, action: Action) -> Work:
        (shard, _), batch, i = self._exchange(), self._parts.batch, action.microbatch
        slot, evaluates = self._boundary_slot("F", action), self._parts.evaluates
        return lambda: shard.make_logits(i, slot.take(), batch.targets[i], evaluates=evaluates)

    def _all_gather(self, action: Action) -> Work:
        (shard, collectives), device, i = self._exchange(), self._parts.device, action.microbatch
        slot = self._figures[i]
        return lambda: slot.expect(collectives.all_gather(device, shard.figures(i)))

    def _combined(self, action: Action) -> Work:
        """Make one softmax of the devices' parts; the device of the last stage has the loss then."""
        (shard, _), batch, i = self._exchange(), self._parts.batch, action.microbatch
        slot, has_last = self._figures[i], self._has_last

        def work() -> None:
            shard.combine(i, slot.take())
            if has_last:
                batch.losses[i].copy_(shard.loss(i))

        return work

    def _add_weight_gradient(self, action: Action) -> Work:
        shard, _ = self._exchange()
        if self._parts.evaluates:
            return _in_sequence(self._combined(action), partial(shard.drop, action.microbatch))
        add = partial(shard.add_weight_gradient, action.microbatch)
        return add if shard.barriers == 1 else _in_sequence(self._combined(action), add)

    def _reduce_input(self, action: Action) -> Work:
        (shard, collectives), device, i = self._exchange(), self._parts.device, action.microbatch
        target = self._parts.program.placement[self._last_stage]
        slot = self._boundary_slot("B", action)

        def work() -> None:
            receipt = collectives.reduce(device, target, shard.take_gradient(i))
            if receipt is not None:
                slot.expect(receipt)

        return work if shard.barriers == 2 else _in_sequence(self._combined(action), work)

    def _boundary_slot(self, direction: Direction, action: Action) -> MessageSlot:
        slot = self._slot(direction, self._last_stage, action.microbatch)
        assert slot is not None, "a vocabulary layer follows the last stage"
        return slot

    def _backward(self, action: Action, backward: Callable[[int, Tree], Tree]) -> Work:
        i = action.microbatch
        used, made = self._used(action), self._slot("B", action.stage - 1, i)
        if action.key in self._blocks:
            return self._part_by_part(action, partial(self._backward_in_parts, self._stage(action), i, used, made))

        def work() -> None:
            gradient = backward(i, used.take() if used is not None else None)
            if made is not None:
                made.tree = gradient

        return work

    def _part_by_part(self, action: Action, one: Callable[[], InParts[None]]) -> Work:
        self._passes[action.key] = one
        return lambda: run_whole(one())

    def _forward_in_parts(
        self, stage: Stage, i: int, fused: bool, used: MessageSlot | None, made: MessageSlot | None
    ) -> InParts[None]:
        batch = self._parts.batch
        received = used.take() if used is not None else batch.inputs[i]
        output = yield from stage.forward_in_parts(i, received, batch.targets[i] if made is None else None, fused)
        if made is not None:
            made.tree = output
        else:
            batch.losses[i].copy_(output)

    def _backward_in_parts(
        self, stage: Stage, i: int, used: MessageSlot | None, made: MessageSlot | None
    ) -> InParts[None]:
        gradient = yield from stage.backward_in_parts(i, used.take() if used is not None else None)
        if made is not None:
            made.tree = gradient

    def _offload(self, action: Action) -> Work:
        assert action.slab is not None, "an offload has a slab"
        mode = self._parts.program.modes.get((action.stage, action.microbatch), "")
        slab, precision = self._parts.slabs[action.slab], IN_LOW_PRECISION.get(mode)
        return partial(self._stage(action).copy_out, action.microbatch, slab, precision)

    def _reduce(self, action: Action) -> Work:
        if action.stage not in self._parts.reducers:
            raise TrainingError(
                f"the program sums the gradients of stage {action.stage} over replicas, but reducers has "
                f"{sorted(self._parts.reducers)}. Maybe compile the schedule without reductions."
            )
        return self._parts.reducers[action.stage]

    def _send(self, action: Action) -> Work:
        send, slot = self._channel(action, sends=True).send, self._message(action)
        return lambda: send(slot.take())

    def _receive(self, action: Action) -> Work:
        post_receive, slot = self._channel(action, sends=False).post_receive, self._message(action)

        def work() -> None:
            slot.receipt = post_receive()

        return work

    def _message(self, action: Action) -> MessageSlot:
        slot = self._slot(*action.message)
        assert slot is not None, "messages cross boundaries within the model"
        return slot

    def _channel(self, action: Action, *, sends: bool) -> Channel:
        assert action.peer is not None, "a message has a peer"
        parts, message = self._parts, action.message
        pair = (parts.device, action.peer) if sends else (action.peer, parts.device)
        device: torch.device = self._stage(action).device
        spec = (
            partial(_spec_of, parts.batch, message.boundary, message.microbatch)
            if parts.specs is None
            else parts.specs[message.boundary]
        )
        return open_channel(parts.transport, pair, message.boundary, message.direction, spec, device)


def _spec_of(batch: Batch, boundary: int, microbatch: int) -> Spec:
    """The spec of a message in the step that runs."""
    return batch.messages[microbatch][boundary]


def _nothing() -> None:
    """Nothing: the F of a block runs with its backward."""


def _run_block(backward: Callable[[], InParts[None]], forward: Callable[[], InParts[None]]) -> None:
    run_as_block(backward(), forward())


def _in_sequence(first: Work | None, second: Work) -> Work:
    if first is None:
        return second

    def both() -> None:
        first()
        second()

    return both


class DeviceExecutor:
    """Executor of a device's list, with its position in it. `point` actions come before the validation point."""

    def __init__(self, parts: DeviceParts, point: int = 0) -> None:
        self.number, self.streams, self.slabs = parts.device, parts.streams, parts.slabs
        self._batch = parts.batch
        self._actions, self._slots = ActionBinder(parts).bind()
        self._gates = [bound.gate for bound in self._actions]
        self._plain_calls = [bound.call for bound in self._actions]
        self._calls = self._plain_calls
        self._index = self._end = len(self._actions)
        self._point = point

    def begin(self, batch: Batch, meter: MemoryMeter | None, recorder: Recorder | None) -> None:
        """Go to the start of the list with a new batch, observed by a meter, a recorder, both or none."""
        self._batch.inputs, self._batch.targets, self._batch.losses = batch.inputs, batch.targets, batch.losses
        self._batch.messages = batch.messages
        observed = meter is not None or recorder is not None
        self._calls = self._plain_calls
        if observed:
            self._calls = [self._observed(bound, meter, recorder) for bound in self._actions]
        self._index, self._end = 0, len(self._actions)
        self.streams.begin()

    def stop_at_point(self) -> None:
        """Run to the validation point only, until `go_on` or `begin_anew`."""
        self._end = self._point

    def go_on(self) -> None:
        """Continue from the validation point to the end of the list."""
        self._end = len(self._actions)

    def begin_anew(self) -> None:
        """Roll back to the start of the list: wait for messages whose receives are posted, and drop all messages."""
        for slot in self._slots:
            if slot.receipt is not None:
                slot.arrive()
            slot.clear()
        self._index, self._end = 0, len(self._actions)

    def end(self) -> None:
        """End a step: release its data, and grow slabs that were too small."""
        self.streams.end()
        self._forget_batch()
        if self.slabs.too_small:
            self.streams.synchronize()  # growing frees the old buffer: no copy may be in progress
            self.slabs.grow()

    def clear(self) -> None:
        """Wait for all issued work and release all data, after an error."""
        self.streams.synchronize()
        for slot in self._slots:
            slot.clear()
        self._forget_batch()
        self._index = self._end = len(self._actions)

    @property
    def done(self) -> bool:
        """True if all actions up to the stop have run."""
        return self._index == self._end

    @property
    def next_action(self) -> Action:
        """The next action to run."""
        return self._actions[self._index].action

    def advance(self, most: int | None = None) -> int:
        """Run actions, at most `most`, until one needs a message that has not arrived; return how many ran.

        Raises TrainingError that shows the program around a failed action, RunFailedError where that was left without a
        message of another process.
        """
        calls, gates = self._calls, self._gates
        index = begin = self._index
        end = self._end if most is None else min(begin + most, self._end)
        try:
            while index < end:
                gate = gates[index]
                if gate is not None and gate.receipt is not None and not gate.receipt.ready():
                    break
                calls[index]()
                index += 1
        except Exception as error:
            self._index = index
            where = f"{self.next_action}, action {index} of {len(self._actions)}"
            what = f"{type(error).__name__}: {error}"
            if is_peer_error(error):
                raise RunFailedError(
                    f"device {self.number} could not exchange messages with another process at {where}: {what}. Maybe "
                    f"that has failed or ended: see what it printed.\n{self.excerpt()}"
                ) from error
            failed = TrainingError(f"device {self.number} failed at {where}: {what}\n{self.excerpt()}")
            failed.only_here = True
            raise failed from error
        self._index = index
        return index - begin

    def excerpt(self) -> str:
        """Text of the list around the next action."""
        return excerpt([bound.action for bound in self._actions], self._index)

    def _forget_batch(self) -> None:
        self._batch.inputs = self._batch.targets = self._batch.losses = self._batch.messages = ()
        self._calls = self._plain_calls

    def _observed(self, bound: BoundAction, meter: MemoryMeter | None, recorder: Recorder | None) -> Work:
        """The call of an action with its memory counted and its times recorded."""
        counted = self.number if bound.counted else None
        number, action, stream = self.number, bound.action, self.streams.stream(bound.action)

        def call() -> None:
            with meter.on(counted) if meter is not None else nullcontext():
                if recorder is None:
                    bound.call()
                    return
                # Recorded ops run apart, so that each has a time of its own.
                recorder.begin(number, action, stream)
                if bound.arrival is not None:
                    bound.arrival()
                    recorder.waited()
                bound.work()
                recorder.end()

        return call
