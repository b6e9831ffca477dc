"""Plays a program: each device's list in order, in one thread.

Devices that share a process take turns: one goes on until it needs a message that has not come. Within one device
the order is that of its list, whatever the turns, so results and memory are the same in one process and in many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from optpipe.compile.actions import Action, Message, Program, excerpt
from optpipe.errors import TrainingError
from optpipe.runtime.host_pool import HostPool
from optpipe.runtime.memory_meter import MemoryMeter
from optpipe.runtime.stage import Stage
from optpipe.runtime.transport import MessageSpec, Receipt, Transport


class Pipeline:
    """The devices of a program that this process runs.

    `stages` holds this process's stages by number, `devices` its devices; `messages[b]` is what crosses the boundary
    between stages b and b+1.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        devices: Sequence[int],
        transport: Transport,
        messages: Sequence[MessageSpec],
    ) -> None:
        self.program = program
        self._transport = transport
        self._stages = stages
        self._devices = [_Device(program, d, stages, transport, messages) for d in devices]

    def run(self, inputs: Sequence[Tensor], targets: Sequence[Tensor], meter: MemoryMeter | None = None) -> Tensor:
        """One step: every microbatch forward and backward, gradients added to `.grad`.

        `inputs[i]` and `targets[i]` are microbatch i's. Returns the losses, shape (microbatches,), zeros where
        the last stage is in another process. With a meter, counts live and peak bytes by device. Raises
        TrainingError that shows the program around an action that failed; nothing is held afterwards.
        """
        self._zero_gradients()
        losses = torch.zeros(self.program.microbatches, dtype=torch.float64)
        for device in self._devices:
            device.begin(inputs, targets, losses, meter)
        try:
            with meter or nullcontext():
                self._play()
                self._transport.finish()
        except BaseException:
            self._clear()
            raise
        return losses

    @property
    def host_pools(self) -> Mapping[int, HostPool]:
        """The host buffers of each device of this process."""
        return {device.number: device.host_pool for device in self._devices}

    def _zero_gradients(self) -> None:
        for stage in self._stages.values():
            stage.zero_gradients()

    def _play(self) -> None:
        while not all(device.done for device in self._devices):
            if not sum([device.advance() for device in self._devices]):
                blocked = ", ".join(str(device.next_action) for device in self._devices if not device.done)
                raise TrainingError(f"nothing can go on: {blocked} wait for messages that nobody sends")

    def _clear(self) -> None:
        self._transport.clear()
        for device in self._devices:
            device.clear()
        for stage in self._stages.values():
            stage.clear()


class _Device:
    """One device's place in its list, and the messages that it holds."""

    def __init__(
        self,
        program: Program,
        device: int,
        stages: Mapping[int, Stage],
        transport: Transport,
        specs: Sequence[MessageSpec],
    ) -> None:
        self.number, self._program, self.host_pool = device, program, HostPool()
        self._stages, self._transport, self._specs = stages, transport, specs
        self._actions = program.devices[device]
        self._last_stage = len(program.placement) - 1
        self._place = len(self._actions)
        self._messages: dict[Message, Tensor] = {}
        self._incoming: dict[Message, Receipt] = {}
        self._run: dict[str, Callable[[Action], None]] = {
            "F": self._forward,
            "B": self._backward,
            "BW": self._backward,
            "W": lambda action: self._stages[action.stage].backward_weight(action.microbatch),
            "O": self._offload,
            "R": lambda action: self._stages[action.stage].reload(action.microbatch),
            **dict.fromkeys(("SEND_F", "SEND_B"), self._send),
            **dict.fromkeys(("RECV_F", "RECV_B"), self._post_receive),
        }

    def begin(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], losses: Tensor, meter: MemoryMeter | None
    ) -> None:
        """Back to the start of the list, with a new batch."""
        self._place = 0
        self._inputs, self._targets, self._losses, self._meter = inputs, targets, losses, meter

    @property
    def done(self) -> bool:
        return self._place == len(self._actions)

    @property
    def next_action(self) -> Action:
        return self._actions[self._place]

    def advance(self) -> int:
        """Run actions until one needs a message that has not come; returns how many ran."""
        before = self._place
        while not self.done and self._may_go(self.next_action):
            try:
                with self._counted(self.number):
                    self._run[self.next_action.kind](self.next_action)
            except Exception as error:
                raise TrainingError(self._failure(error)) from error
            self._place += 1
        return self._place - before

    def clear(self) -> None:
        self._messages.clear()
        self._incoming.clear()
        self._place = len(self._actions)

    def _may_go(self, action: Action) -> bool:
        used = self._used(action)
        return used not in self._incoming or self._incoming[used].ready()

    @staticmethod
    def _used(action: Action) -> Message | None:
        """The message that an action uses, if it uses one."""
        if action.kind == "F":
            return Message("F", action.stage - 1, action.microbatch)
        return Message("B", action.stage, action.microbatch) if action.kind in ("B", "BW") else None

    def _take(self, message: Message) -> Tensor:
        if message in self._incoming:
            return self._incoming.pop(message).wait()
        return self._messages.pop(message)

    def _forward(self, action: Action) -> None:
        s, i = action.stage, action.microbatch
        received = self._take(Message("F", s - 1, i)) if s else self._inputs[i]
        target = self._targets[i] if s == self._last_stage else None
        output = self._stages[s].forward(i, received, target, (s, i) in self._program.offloaded)
        if s == self._last_stage:
            self._losses[i].copy_(output)
        else:
            self._messages[Message("F", s, i)] = output

    def _backward(self, action: Action) -> None:
        kind, s, i = action.key
        gradient = self._take(Message("B", s, i)) if s < self._last_stage else None
        stage = self._stages[s]
        backward = stage.backward if kind == "BW" else stage.backward_input
        input_gradient = backward(i, gradient)
        if input_gradient is not None:
            self._messages[Message("B", s - 1, i)] = input_gradient

    def _offload(self, action: Action) -> None:
        with self._counted(None):
            self._stages[action.stage].offload(action.microbatch, self.host_pool)

    def _send(self, action: Action) -> None:
        assert action.peer is not None, "a send has a peer"
        message = self._messages.pop(action.message)
        with self._counted(None):
            self._transport.send(self.number, action.peer, message)

    def _post_receive(self, action: Action) -> None:
        assert action.peer is not None, "a receive has a peer"
        spec = self._specs[action.message.boundary]
        self._incoming[action.message] = self._transport.post_receive(action.peer, self.number, spec)

    def _counted(self, device: int | None) -> AbstractContextManager[None]:
        return self._meter.on(device) if self._meter else nullcontext()

    def _failure(self, error: Exception) -> str:
        return (
            f"device {self.number} failed at {self.next_action}, action {self._place} of {len(self._actions)}: "
            f"{type(error).__name__}: {error}\n{excerpt(self._actions, self._place)}"
        )
