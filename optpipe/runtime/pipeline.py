"""Plays a program: each device's list in order, in one thread.

Devices that share a process take turns, one action each: a device whose next message has not come is passed over.
Within one device the order is that of its list, whatever the turns, so results and memory are the same in one process
and in many.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from optpipe.compile import Program, compile_forward
from optpipe.compile.validation_point import validation_points
from optpipe.errors import TrainingError
from optpipe.runtime.activations import HostSlabs
from optpipe.runtime.executor import Batch, DeviceExecutor, DeviceParts, Reducer
from optpipe.runtime.gradient_sync import GradientReduction
from optpipe.runtime.messages import Spec, Tree
from optpipe.runtime.recorder import MemoryMeter, Recorder
from optpipe.runtime.stage import Stage, evaluating
from optpipe.runtime.streams import Streams, make_streams
from optpipe.runtime.transport import Transport, peer_errors

SENT = "what processes send one another"


class Pipeline:
    """The devices of a program that this process runs.

    `stages` holds this process's stages by number, `devices` its devices; `messages[b]` is what crosses the boundary
    between stages b and b+1. `sync` sums gradients over replicas, where the program asks for it, and those of shared
    parameters at the end of a step.
    `offload_bytes[s]` is what a microbatch of stage s takes on the host, if known: pinned memory is then there before
    the first step, else from the second on. `streams` makes those of a device for its kind of hardware.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        devices: Sequence[int],
        transport: Transport,
        messages: Sequence[Spec],
        *,
        sync: GradientReduction | None = None,
        offload_bytes: Mapping[int, int] | None = None,
        streams: Callable[[torch.device], Streams] = make_streams,
    ) -> None:
        self.program = program
        self._transport, self._stages, self._sync = transport, stages, sync
        reducers = sync.reducers if sync else {}
        for number, stage in stages.items():
            stage.join(number, program.kinds_of(number))
        self._parts = {
            device: _parts(program, device, stages, transport, messages, reducers, offload_bytes or {}, streams)
            for device in devices
        }
        points = validation_points(program)
        self._executors = [DeviceExecutor(parts, points[device]) for device, parts in self._parts.items()]
        self._evaluators: dict[int, list[DeviceExecutor]] = {}

    def run(
        self,
        inputs: Sequence[Tree],
        targets: Sequence[Tree],
        meter: MemoryMeter | None = None,
        recorder: Recorder | None = None,
        *,
        validate: Callable[[], bool] | None = None,
        leave_sends: bool = False,
        zero_gradients: bool = True,
    ) -> Tensor:
        """One step: every microbatch forward and backward, gradients added to `.grad`.

        `.grad` is zeroed before, unless `zero_gradients` is false: then gradients add up over steps.
        `inputs[i]` and `targets[i]` are microbatch i's. Returns the losses, shape (microbatches,), on the device of
        the last stage; zeros where that is in another process. With a meter, counts live and peak bytes by device;
        with a recorder, tells it of every action. Raises TrainingError that shows the program around an action that
        failed, and RunFailedError where another process has ended; nothing is held afterwards.

        `validate` is called once, at the latest point that no gradient of this step has touched yet: until then
        `.grad` holds the last step's. It says whether the weights are those that the step began with, up to then; if
        not, what was done of the step is dropped and done again. All processes give the same answer.
        With `leave_sends` the step ends though others may not have received all that was sent to them; the next step,
        or `settle`, sees to that.
        """
        for stage in self._stages.values():
            stage.begin_step()
        if validate is None and zero_gradients:
            self._zero_gradients()
        return self._step(
            self._executors, inputs, targets, meter, recorder, validate, sync=self._sync, leave_sends=leave_sends
        )

    def settle(self) -> None:
        """Wait until others have received all that was sent to them."""
        with peer_errors(SENT):
            self._transport.finish()

    def evaluate(
        self,
        inputs: Sequence[Tree],
        targets: Sequence[Tree],
        meter: MemoryMeter | None = None,
        *,
        change_mode: bool = True,
    ) -> Tensor:
        """The losses of any number of microbatches, forward only and in evaluation mode.

        With `change_mode` false, modules stay in the mode that the caller has put them in. Touches no gradient and
        keeps nothing. Returns and raises as `run`; all processes call it together, with as many microbatches.
        """
        with evaluating(stage.module for stage in self._stages.values()) if change_mode else nullcontext():
            return self._step(self._evaluators_of(len(inputs)), inputs, targets, meter, None)

    @property
    def host_slabs(self) -> Mapping[int, HostSlabs]:
        """The host memory of each device of this process."""
        return {device: parts.slabs for device, parts in self._parts.items()}

    def _step(
        self,
        executors: Sequence[DeviceExecutor],
        inputs: Sequence[Tree],
        targets: Sequence[Tree],
        meter: MemoryMeter | None,
        recorder: Recorder | None,
        validate: Callable[[], bool] | None = None,
        *,
        sync: GradientReduction | None = None,
        leave_sends: bool = False,
    ) -> Tensor:
        losses = self._room_for_losses(len(inputs))
        batch = Batch(inputs, targets, losses.unbind())
        try:
            with meter or nullcontext():
                for executor in executors:
                    executor.begin(batch, meter, recorder)
                if validate is not None:
                    self._play_to_points(executors, validate)
                _play(executors)
                with peer_errors(SENT):
                    self._transport.close_step() if leave_sends else self._transport.finish()
            for executor in executors:
                executor.end()
            if sync:
                with peer_errors("the sums of gradients"):
                    sync.finish()
        except BaseException as error:
            self._clear(executors, error)
            raise
        return losses

    def _play_to_points(self, executors: Sequence[DeviceExecutor], validate: Callable[[], bool]) -> None:
        """Up to every validation point; then the verdict says whether to go on or to begin anew."""
        for executor in executors:
            executor.stop_at_point()
        _play(executors)
        for executor in executors:
            executor.streams.end()
        right = validate()
        self._zero_gradients()
        with peer_errors(SENT):
            self._transport.finish_closed()
            for executor in executors:
                executor.go_on() if right else executor.begin_anew()
        if not right:
            for stage in self._stages.values():
                stage.clear()
        for executor in executors:
            executor.streams.begin()

    def _zero_gradients(self) -> None:
        for stage in self._stages.values():
            stage.zero_gradients()

    def _evaluators_of(self, microbatches: int) -> Sequence[DeviceExecutor]:
        """Players of forwards alone, made at the first evaluation of so many microbatches."""
        if microbatches not in self._evaluators:
            program = compile_forward(self.program.placement, microbatches, len(self.program.devices))
            self._evaluators[microbatches] = [
                DeviceExecutor(replace(parts, program=program, evaluates=True, batch=Batch()))
                for parts in self._parts.values()
            ]
        return self._evaluators[microbatches]

    def _room_for_losses(self, microbatches: int) -> Tensor:
        last = self._stages.get(len(self.program.placement) - 1)
        return torch.zeros(microbatches, dtype=torch.float64, device=last.device if last else None)

    def _clear(self, executors: Sequence[DeviceExecutor], error: BaseException) -> None:
        """Leave nothing behind: what is on its way, in streams, slots, slabs, stages, and in the error's frames."""
        self._transport.clear()
        if self._sync:
            self._sync.clear()
        for executor in executors:
            executor.clear()
        for stage in self._stages.values():
            stage.clear()
        _clear_frames(error)


def _play(executors: Sequence[DeviceExecutor]) -> None:
    """Let the players take turns until all are done."""
    turn = 1 if len(executors) > 1 else None
    while executors := [executor for executor in executors if not executor.done]:
        if not sum([executor.advance(turn) for executor in executors]):
            blocked = ", ".join(str(executor.next_action) for executor in executors)
            around = "\n".join(f"device {executor.number}:\n{executor.excerpt()}" for executor in executors)
            raise TrainingError(f"nothing can go on: {blocked} wait for messages that nobody sends\n{around}")


def _parts(
    program: Program,
    device: int,
    stages: Mapping[int, Stage],
    transport: Transport,
    messages: Sequence[Spec],
    reducers: Mapping[int, Reducer],
    offload_bytes: Mapping[int, int],
    streams: Callable[[torch.device], Streams],
) -> DeviceParts:
    """What a device's actions work with, on the hardware where its stages are."""
    mine = [stages[s] for s, home in enumerate(program.placement) if home == device]
    hardware = mine[0].device if mine else torch.device("cpu")
    planned = program.slabs[device] if program.slabs else ()
    sizes = [max(offload_bytes.get(stage, 0) for stage in slab.stages) for slab in planned]
    slabs = HostSlabs(sizes, pinned=hardware.type == "cuda")
    return DeviceParts(program, device, stages, messages, transport, streams(hardware), slabs, reducers)


def _clear_frames(error: BaseException | None) -> None:
    """The frames of an error hold the tensors that its functions worked with; its text needs none of them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
