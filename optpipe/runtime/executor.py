"""Executor of one device: actions bound to the parts they work on, run in program order.

What an action costs beside its work is what the host pays for a schedule, so no name is looked up and nothing is
allocated per action: messages pass through slots, and each call knows its stage, microbatch and slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optpipe.compile.program import Action, Message, Program, excerpt
from optpipe.errors import TrainingError
from optpipe.runtime.activations import HostSlabs
from optpipe.runtime.channel import Crossing, Direction, TreeReceipt, crossing
from optpipe.runtime.messages import Spec, Tree
from optpipe.runtime.recorder import MemoryMeter, Recorder
from optpipe.runtime.stage import Stage
from optpipe.runtime.streams import Streams, Work
from optpipe.runtime.transport import Transport

Reducer = Callable[[], None]
"""Sums the gradients of one stage over its replicas."""

_NOTHING = object()
"""What a slot holds that holds no message; None is a gradient where there is none."""


class MessageSlot:
    """Where one message lies between the action that makes it and the one that uses it."""

    __slots__ = ("receipt", "tree")

    def __init__(self) -> None:
        self.tree: Tree = _NOTHING
        self.receipt: TreeReceipt | None = None

    def take(self) -> Tree:
        """The message, which is held no longer."""
        tree = self.tree
        assert tree is not _NOTHING, "the message was not made yet"
        self.tree = _NOTHING
        return tree

    def arrive(self) -> None:
        """Wait for the message that a receive was posted for."""
        assert self.receipt is not None, "no receive was posted for the message"
        self.tree = self.receipt.wait()
        self.receipt = None

    def clear(self) -> None:
        """Drop what it holds: after an error."""
        self.tree, self.receipt = _NOTHING, None


@dataclass
class Batch:
    """What a step works on; `losses` are scalars, one for each microbatch."""

    inputs: Sequence[Tree] = ()
    targets: Sequence[Tree] = ()
    losses: Sequence[Tensor] = ()


@dataclass(frozen=True)
class BoundAction:
    """One action. `arrival` is what comes before its work: its stream, its events, its message.

    It may not begin before `gate`'s message has come. `counted`: whether what it allocates is the device's.
    """

    action: Action
    arrival: Work | None
    work: Work
    gate: MessageSlot | None
    counted: bool

    @property
    def call(self) -> Work:
        """Arrival and work in one."""
        return _one_after_the_other(self.arrival, self.work)


@dataclass
class DeviceParts:
    """What the actions of one device work with. `evaluates`: forwards leave nothing for a backward."""

    program: Program
    device: int
    stages: Mapping[int, Stage]
    specs: Sequence[Spec]
    transport: Transport
    streams: Streams
    slabs: HostSlabs
    reducers: Mapping[int, Reducer]
    batch: Batch = field(default_factory=Batch)
    evaluates: bool = False


class ActionBinder:
    """Binds the actions of one device."""

    def __init__(self, parts: DeviceParts) -> None:
        self._parts = parts
        self._last_stage = len(parts.program.placement) - 1
        self._slots: dict[Message, MessageSlot] = {}
        actions = parts.program.devices[parts.device]
        self._fused = {(action.stage, action.microbatch) for action in actions if action.kind == "BW"}
        self._work: Mapping[str, Callable[[Action], Work]] = {
            "F": self._forward,
            "B": lambda action: self._backward(action, self._stage(action).backward_input),
            "BW": lambda action: self._backward(action, self._stage(action).backward),
            "W": self._backward_weight,
            "O": self._offload,
            "RELEASE": self._release,
            "PREPARE": self._prepare,
            "R": self._reload,
            "REDUCE": self._reduce,
            "SEND_F": self._send,
            "SEND_B": self._send,
            "RECV_F": self._receive,
            "RECV_B": self._receive,
        }

    def steps(self) -> list[BoundAction]:
        """The device's list, bound."""
        return [self._step(action) for action in self._parts.program.devices[self._parts.device]]

    def slots(self) -> list[MessageSlot]:
        """All slots, once the steps are made."""
        return list(self._slots.values())

    def _step(self, action: Action) -> BoundAction:
        streams, program = self._parts.streams, self._parts.program
        work = streams.issuing(action, self._work[action.kind](action), action.key in program.awaited)
        gate = self._used(action) if self._is_received(action) else None
        arrival = streams.arrival(action)
        if gate is not None:
            arrival = _one_after_the_other(arrival, gate.arrive)
        return BoundAction(action, arrival, work, gate, counted=action.kind not in ("O", "SEND_F", "SEND_B"))

    def _stage(self, action: Action) -> Stage:
        return self._parts.stages[action.stage]

    def _slot(self, direction: Direction, boundary: int, microbatch: int) -> MessageSlot | None:
        """The slot of a message; None beyond the ends of the model."""
        if not 0 <= boundary < self._last_stage:
            return None
        return self._slots.setdefault(Message(direction, boundary, microbatch), MessageSlot())

    def _used(self, action: Action) -> MessageSlot | None:
        """The slot of the message that a compute action uses."""
        if action.kind == "F":
            return self._slot("F", action.stage - 1, action.microbatch)
        return self._slot("B", action.stage, action.microbatch) if action.kind in ("B", "BW") else None

    def _is_received(self, action: Action) -> bool:
        """Whether the message that a compute action uses comes from another device."""
        boundary = action.stage - (action.kind == "F")
        uses = action.kind in ("F", "B", "BW") and 0 <= boundary < self._last_stage
        return uses and self._parts.program.crosses(boundary)

    def _forward(self, action: Action) -> Work:
        s, i = action.stage, action.microbatch
        forward, batch = self._forward_of(self._stage(action)), self._parts.batch
        used, made = self._used(action), self._slot("F", s, i)
        offloads, fused = (s, i) in self._parts.program.offloaded, (s, i) in self._fused

        def work() -> None:
            received = used.take() if used is not None else batch.inputs[i]
            if made is not None:
                made.tree = forward(i, received, None, offloads, fused)
            else:
                batch.losses[i].copy_(forward(i, received, batch.targets[i], offloads, fused))

        return work

    def _forward_of(self, stage: Stage) -> Callable[[int, Tree, Tree | None, bool, bool], Tree]:
        if self._parts.evaluates:
            return lambda microbatch, received, target, _offloads, _fused: stage.evaluate(microbatch, received, target)
        return stage.forward

    def _backward(self, action: Action, backward: Callable[[int, Tree], Tree]) -> Work:
        i = action.microbatch
        used, made = self._used(action), self._slot("B", action.stage - 1, i)

        def work() -> None:
            gradient = backward(i, used.take() if used is not None else None)
            if made is not None:
                made.tree = gradient

        return work

    def _backward_weight(self, action: Action) -> Work:
        backward_weight, i = self._stage(action).backward_weight, action.microbatch
        return lambda: backward_weight(i)

    def _offload(self, action: Action) -> Work:
        assert action.slab is not None, "an offload has a slab"
        copy_out, i, slab = self._stage(action).copy_out, action.microbatch, self._parts.slabs[action.slab]
        return lambda: copy_out(i, slab)

    def _release(self, action: Action) -> Work:
        free, i = self._stage(action).free, action.microbatch
        return lambda: free(i)

    def _prepare(self, action: Action) -> Work:
        allocate, i = self._stage(action).allocate, action.microbatch
        return lambda: allocate(i)

    def _reload(self, action: Action) -> Work:
        copy_in, i = self._stage(action).copy_in, action.microbatch
        return lambda: copy_in(i)

    def _reduce(self, action: Action) -> Work:
        if action.stage not in self._parts.reducers:
            raise TrainingError(
                f"the program sums the gradients of stage {action.stage} over replicas, but reducers has "
                f"{sorted(self._parts.reducers)}. Maybe compile the schedule without reductions."
            )
        return self._parts.reducers[action.stage]

    def _send(self, action: Action) -> Work:
        send, slot = self._crossing(action, sends=True).send, self._message(action)
        return lambda: send(slot.take())

    def _receive(self, action: Action) -> Work:
        post_receive, slot = self._crossing(action, sends=False).post_receive, self._message(action)

        def work() -> None:
            slot.receipt = post_receive()

        return work

    def _message(self, action: Action) -> MessageSlot:
        slot = self._slot(*action.message)
        assert slot is not None, "messages cross boundaries within the model"
        return slot

    def _crossing(self, action: Action, *, sends: bool) -> Crossing:
        assert action.peer is not None, "a message has a peer"
        parts, message = self._parts, action.message
        pair = (parts.device, action.peer) if sends else (action.peer, parts.device)
        device: torch.device = self._stage(action).device
        return crossing(
            parts.transport, pair, message.boundary, message.direction, parts.specs[message.boundary], device
        )


def _one_after_the_other(first: Work | None, second: Work) -> Work:
    if first is None:
        return second

    def both() -> None:
        first()
        second()

    return both


class DeviceExecutor:
    """A device's place in its list. `point` is how many of its actions come before its validation point."""

    def __init__(self, parts: DeviceParts, point: int = 0) -> None:
        builder = ActionBinder(parts)
        self.number, self.streams, self.slabs = parts.device, parts.streams, parts.slabs
        self._batch = parts.batch
        self._steps = builder.steps()
        self._slots = builder.slots()
        self._gates = [bound.gate for bound in self._steps]
        self._plain_calls = [bound.call for bound in self._steps]
        self._calls = self._plain_calls
        self._place = self._end = len(self._steps)
        self._point = point

    def begin(self, batch: Batch, meter: MemoryMeter | None, recorder: Recorder | None) -> None:
        """Back to the start of the list, with a new batch; watched by a meter, a recorder, both or none."""
        self._batch.inputs, self._batch.targets, self._batch.losses = batch.inputs, batch.targets, batch.losses
        watched = meter is not None or recorder is not None
        self._calls = [self._watched(bound, meter, recorder) for bound in self._steps] if watched else self._plain_calls
        self._place, self._end = 0, len(self._steps)
        self.streams.begin()

    def stop_at_point(self) -> None:
        """Play to the validation point and no further, until `go_on` or `begin_anew`."""
        self._end = self._point

    def go_on(self) -> None:
        """From the validation point to the end of the list."""
        self._end = len(self._steps)

    def begin_anew(self) -> None:
        """From the start of the list, the messages so far dropped; waits for those that were asked for."""
        for slot in self._slots:
            if slot.receipt is not None:
                slot.arrive()
            slot.clear()
        self._place, self._end = 0, len(self._steps)

    def end(self) -> None:
        """After a step: hold nothing of it, and let slabs that were too small grow."""
        self.streams.end()
        self._forget_batch()
        if self.slabs.too_small:
            self.streams.synchronize()  # no copy may be under way
            self.slabs.grow()

    def clear(self) -> None:
        """After an error: nothing is under way any more, and nothing is held."""
        self.streams.synchronize()
        for slot in self._slots:
            slot.clear()
        self._forget_batch()
        self._place = self._end = len(self._steps)

    @property
    def done(self) -> bool:
        """Whether it is where it stops."""
        return self._place == self._end

    @property
    def next_action(self) -> Action:
        """The action whose turn it is."""
        return self._steps[self._place].action

    def advance(self, most: int | None = None) -> int:
        """Run actions, `most` or all, until one needs a message that has not come; returns how many ran."""
        calls, gates = self._calls, self._gates
        index = begin = self._place
        end = self._end if most is None else min(begin + most, self._end)
        try:
            while index < end:
                gate = gates[index]
                if gate is not None and gate.receipt is not None and not gate.receipt.ready():
                    break
                calls[index]()
                index += 1
        except Exception as error:
            self._place = index
            raise TrainingError(self._failure(error)) from error
        self._place = index
        return index - begin

    def excerpt(self) -> str:
        """The list around the place."""
        return excerpt([bound.action for bound in self._steps], self._place)

    def _forget_batch(self) -> None:
        self._batch.inputs = self._batch.targets = self._batch.losses = ()
        self._calls = self._plain_calls

    def _watched(self, bound: BoundAction, meter: MemoryMeter | None, recorder: Recorder | None) -> Work:
        """The call of a step, with its memory counted and its times recorded."""
        counted = self.number if bound.counted else None
        number, action, stream = self.number, bound.action, self.streams.stream(bound.action)

        def call() -> None:
            with meter.on(counted) if meter is not None else nullcontext():
                if recorder is None:
                    bound.call()
                    return
                recorder.begin(number, action, stream)
                if bound.arrival is not None:
                    bound.arrival()
                    recorder.waited()
                bound.work()
                recorder.end()

        return call

    def _failure(self, error: Exception) -> str:
        return (
            f"device {self.number} failed at {self.next_action}, action {self._place} of {len(self._steps)}: "
            f"{type(error).__name__}: {error}\n{self.excerpt()}"
        )
