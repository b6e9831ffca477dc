"""Pipeline: runs the devices of a program that are in this process, each list in order, in one thread.

Devices that share a process alternate, one action each; a device whose next message has not arrived is skipped. The
order within a device is always that of its list, so results and memory are the same in one process and in many.
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
from optpipe.mode_names import EXAMPLES, IN_LOW_PRECISION, WITH_OFFLOAD, parse_recomputed
from optpipe.runtime.activations import HostSlabs
from optpipe.runtime.collectives import Collectives
from optpipe.runtime.executor import Batch, DeviceExecutor, DeviceParts, Reducer
from optpipe.runtime.gradient_sync import GradientReduction
from optpipe.runtime.messages import Spec, Tree
from optpipe.runtime.recorder import MemoryMeter, Recorder
from optpipe.runtime.shapes import MessageShapes, SliceMessages
from optpipe.runtime.stage import Stage, evaluating
from optpipe.runtime.streams import Streams, make_streams
from optpipe.runtime.transport import Transport, peer_errors
from optpipe.runtime.vocabulary import VocabularyShard

SENT = "what processes send one another"


class Pipeline:
    """The devices of a program that this process runs.

    `stages` holds this process's stages by number, `devices` its devices; `messages[b]` is the spec of messages over
    the boundary between stages b and b+1, or `messages` gives them for each microbatch or slice. `sync` sums gradients
    over replicas at the program's REDUCE actions, and those of shared parameters at the end of a step.
    `offload_bytes[s]` is the host memory of a microbatch of stage s, if known: slabs are then pinned before the first
    step, otherwise after it. `streams` makes the streams of a device.

    `shards` are the rows of a vocabulary layer on this process's devices, where the program has the passes of one, and
    `collectives` how all devices exchange. The parameters of the rows belong to stages; the last stage has no loss, and
    `messages` end with what it gives to the layer. Targets are there in every process.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        devices: Sequence[int],
        transport: Transport,
        messages: Sequence[Spec] | MessageShapes | SliceMessages,
        *,
        sync: GradientReduction | None = None,
        offload_bytes: Mapping[int, int] | None = None,
        streams: Callable[[torch.device], Streams] = make_streams,
        shards: Mapping[int, VocabularyShard] | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        check_modes(program)
        for number, stage in stages.items():
            if stage.sequences.count != program.slices:
                raise TrainingError(
                    f"stages[{number}] takes {stage.sequences.count} slices of a sequence, but the program has "
                    f"{program.slices}. Maybe make the stages for this schedule."
                )
        self.program = program
        self._transport, self._stages, self._sync = transport, stages, sync
        self._shards, self._collectives = shards or {}, collectives
        self._last = stages.get(len(program.placement) - 1)
        self._shapes = messages if isinstance(messages, MessageShapes | SliceMessages) else None
        specs = None if isinstance(messages, MessageShapes | SliceMessages) else messages
        reducers = sync.reducers if sync else {}
        for number, stage in stages.items():
            stage.join(number, program.kinds_of(number), program.first_trained)
        self._parts = {
            device: _parts(program, device, stages, transport, specs, reducers, offload_bytes or {}, streams)
            for device in devices
        }
        for device, shard in self._shards.items():
            self._parts[device].shard, self._parts[device].collectives = shard, collectives
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
        """Run one step: every microbatch forward and backward, gradients added to `.grad`.

        `.grad` is zeroed first, unless `zero_gradients` is false: then gradients accumulate over steps. `inputs[i]` and
        `targets[i]` belong to unit i (a microbatch, or a slice of one), and are there in every process where messages
        differ. Returns the losses, shape (units,), on the device of the last stage; zeros in a process without it. The
        last stage keeps their terms (`Stage.loss_terms`). A meter counts live and peak bytes by device, a recorder is
        called around every action. Raises TrainingError that shows the program around a failed action, and
        RunFailedError if another process has ended; nothing is held afterwards.

        `validate` is called once, at the validation points: the latest moment before a gradient of this step is added,
        until which `.grad` holds those of the last step. It returns true if the weights have not changed since the step
        started; otherwise the step is rolled back and repeated. It must return the same value in all processes.
        With `leave_sends` the step may end before its sends have arrived; the next step, or `settle`, waits for them.
        """
        for stage in self._stages.values():
            stage.begin_step()
        if self._last:
            self._last.loss_terms.begin_step(len(inputs), self._last.device)
        if validate is None and zero_gradients:
            self._zero_gradients()
        return self._step(
            self._executors, inputs, targets, meter, recorder, validate, sync=self._sync, leave_sends=leave_sends
        )

    def settle(self) -> None:
        """Wait until all sends have arrived."""
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
        """Losses of any number of microbatches, forward only and in evaluation mode.

        With `change_mode` false, modules keep their mode. Changes no gradient and keeps nothing. Returns and raises as
        `run`; all processes call it together, with the same number of microbatches.
        """
        count = len(inputs)
        if count not in self._evaluators:
            slices = self.program.slices
            program = compile_forward(
                self.program.placement, count // slices, len(self.program.devices), slices, self.program.vocabulary
            )
            self._evaluators[count] = [
                DeviceExecutor(replace(parts, program=program, evaluates=True, batch=Batch()))
                for parts in self._parts.values()
            ]
        with evaluating(stage.module for stage in self._stages.values()) if change_mode else nullcontext():
            return self._step(self._evaluators[count], inputs, targets, meter, None)

    @property
    def host_slabs(self) -> Mapping[int, HostSlabs]:
        """Host slabs of each device of this process."""
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
        losses = torch.zeros(len(inputs), dtype=torch.float64, device=self._last.device if self._last else None)
        messages = self._shapes.of_units(inputs) if self._shapes else ()
        batch = Batch(inputs, targets, losses.unbind(), messages)
        try:
            with meter or nullcontext():
                for executor in executors:
                    executor.begin(batch, meter, recorder)
                if validate is not None:
                    self._run_to_points(executors, validate)
                _run(executors)
                with peer_errors(SENT):
                    self._transport.close_step() if leave_sends else self._transport.finish()
                    if self._collectives is not None:
                        self._collectives.finish()
            for executor in executors:
                executor.end()
            if sync:
                with peer_errors("the sums of gradients"):
                    sync.finish()
        except BaseException as error:
            self._clear(executors, error)
            raise
        return losses

    def _run_to_points(self, executors: Sequence[DeviceExecutor], validate: Callable[[], bool]) -> None:
        """Run to every validation point, then continue or roll back by the result of `validate`."""
        for executor in executors:
            executor.stop_at_point()
        _run(executors)
        for executor in executors:
            executor.streams.end()
        valid = validate()
        self._zero_gradients()
        with peer_errors(SENT):
            self._transport.finish_closed()
            for executor in executors:
                executor.go_on() if valid else executor.begin_anew()
        if not valid:
            for stage in self._stages.values():
                stage.clear()
        for executor in executors:
            executor.streams.begin()

    def _zero_gradients(self) -> None:
        for stage in self._stages.values():
            stage.zero_gradients()

    def _clear(self, executors: Sequence[DeviceExecutor], error: BaseException) -> None:
        """Release everything after an error: messages, streams, slots, slabs, stages, and the frames of the error.

        The frames hold tensors that the functions worked with, and the text of the error needs none of them.
        """
        self._transport.clear()
        if self._sync:
            self._sync.clear()
        for executor in executors:
            executor.clear()
        for stage in self._stages.values():
            stage.clear()
        for shard in self._shards.values():
            shard.clear()
        if self._collectives is not None:
            self._collectives.clear()
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__


def check_modes(program: Program) -> None:
    """Raise TrainingError if the program holds an activation in a mode that the executor does not have."""
    for (stage, microbatch), name in program.modes.items():
        recomputes = (stage, microbatch) in program.recomputed
        known = parse_recomputed(name) is not None if recomputes else name in IN_LOW_PRECISION
        if not known:
            raise TrainingError(
                f"stages[{stage}] has the mode {name!r}, which the executor does not know: beside 'kept' and 'offload' "
                f"it has {', '.join(IN_LOW_PRECISION)}, {EXAMPLES}, each from full on also with '{WITH_OFFLOAD}' "
                "behind it. Maybe solve with these modes alone."
            )


def _run(executors: Sequence[DeviceExecutor]) -> None:
    """Run executors in turns until all are done."""
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
    messages: Sequence[Spec] | None,
    reducers: Mapping[int, Reducer],
    offload_bytes: Mapping[int, int],
    streams: Callable[[torch.device], Streams],
) -> DeviceParts:
    """Objects that a device's actions work on, on the hardware of its stages."""
    own_stages = [stages[s] for s, home in enumerate(program.placement) if home == device]
    hardware = own_stages[0].device if own_stages else torch.device("cpu")
    planned = program.slabs[device] if program.slabs else ()
    sizes = [max(offload_bytes.get(stage, 0) for stage in slab.stages) for slab in planned]
    slabs = HostSlabs(sizes, pinned=hardware.type == "cuda")
    return DeviceParts(program, device, stages, messages, transport, streams(hardware), slabs, reducers)
