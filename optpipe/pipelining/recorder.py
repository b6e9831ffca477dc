"""Recorder: costs of the stages of a trainer, measured in a few of its own steps; and a schedule to measure by."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from optpipe.compile.program import Action
from optpipe.errors import InputError, Issue, TrainingError
from optpipe.files import write_atomically
from optpipe.mode_names import IN_LOW_PRECISION, KEPT, OFFLOAD, WITH_OFFLOAD, without_offload
from optpipe.ops import DeviceOrders, Op, OpArray, Orders
from optpipe.pipelining import fsdp
from optpipe.pipelining.schedule import PlannedSchedule
from optpipe.problem import Problem
from optpipe.runtime.messages import leaves
from optpipe.runtime.recorder import CudaMemoryRecorder, CudaRecorder, HostRecorder, MemoryMeter, Timing
from optpipe.runtime.recorder import Recorder as ActionRecorder
from optpipe.runtime.trace_step import Clock, align_clocks
from optpipe.runtime.weight_gradients import compiled_part, is_distributed
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.timed import timed_schedule
from optpipe.trace.record import RECORDING, Held, RankRecord, RecordedMemory, RecordedStage, RecordedStep, Timed

COPIES_OF_A_PARAMETER = 4
"""Weight, gradient, and the two moments of Adam."""

OPS_OF_TORCH = {"forward_one_chunk": "F", "backward_one_chunk": "BW", "backward_weight_one_chunk": "W"}
"""Methods of a PipelineStage that torch's schedules call, and the ops that they are; a backward may be B alone."""


class Recorder:
    """Records steps of a schedule and leaves what `optpipe profile --from-run FOLDER` reads, one file a rank.

    Every rank makes one, with its `PlannedSchedule` or its schedule object of torch, between two steps. After `skip`
    steps it times the actions of `steps` steps and counts the memory of one more, which is slower; then it writes its
    file, and is `done`. With a schedule of torch, `stages` are this rank's.

    A `PlannedSchedule` on `recording_schedule` has every kind of op, each alone on its device: that gives the most.
    Otherwise only what the schedule does is recorded. The first timed step is a collective of the pipeline's ranks,
    which aligns their clocks.
    """

    def __init__(
        self,
        schedule: Any,
        folder: str | Path,
        *,
        steps: int = 3,
        skip: int = 2,
        name: str = "",
        stages: Sequence[PipelineStage] | None = None,
    ) -> None:
        if steps < 1 or skip < 0:
            raise TrainingError(f"steps is {steps} and skip {skip}, but at least one step is to be timed.")
        self._schedule, self._folder, self._steps, self._skip, self._name = schedule, Path(folder), steps, skip, name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._count = 0
        self._clock = Clock()
        self._timed: list[list[Timed]] = []
        self._times: HostRecorder | CudaRecorder | None = None
        self._memory: _StepMemory | None = None
        self.record: RankRecord | None = None
        if isinstance(schedule, PlannedSchedule):
            self._stages = schedule.stages
            schedule.observer = self
            self._detach: Callable[[], None] = partial(setattr, schedule, "observer", None)
        else:
            if not stages:
                raise TrainingError("stages is missing. Maybe stages=[...], this rank's stages of the schedule.")
            self._stages = stages
            self._detach = _StepsOfTorch(schedule, stages, self).detach

    def begin_step(self) -> tuple[MemoryMeter | None, ActionRecorder | None]:
        """Return what observes the actions of the step that now begins."""
        first, step = self._stages[0], self._count - self._skip
        on_gpu = first.device.type == "cuda"
        if step < 0:
            return None, None
        if step < self._steps:
            if step == 0:
                self._clock = align_clocks(first.group, first.device)
            self._times = CudaRecorder() if on_gpu else HostRecorder()
            return None, self._times
        modules = [stage.submod for stage in self._stages]
        gathered = [p for module in modules for p in fsdp.gathered_parameters(module).values()]
        self._memory = _StepMemory([p.untyped_storage() for p in gathered], on_gpu)
        return self._memory.meter, self._memory.actions

    def end_step(self) -> None:
        """Keep what the step has shown; after the last one, write the file."""
        self._count += 1
        if self._times is not None:
            self._timed.append([self._row(timing) for timing in self._times.timings()])
            self._times = None
        elif self._memory is not None:
            self.record = self._recorded(self._memory.rows())
            self._detach()
            self._memory = None
            write_records([self.record], self._folder)

    @property
    def done(self) -> bool:
        """True once `record` is there and the file is written."""
        return self.record is not None

    def _row(self, timing: Timing) -> Timed:
        turn_ns, start_ns, end_ns = (ns - self._clock.offset_ns for ns in timing[2:])
        return Timed(timing.action.key, turn_ns, start_ns, end_ns)

    def _recorded(self, memory: Sequence[Held]) -> RankRecord:
        first, planned = self._stages[0], isinstance(self._schedule, PlannedSchedule)
        of_stages = first.stage_index_to_group_rank
        kind = torch.cuda.get_device_name(first.device) if first.device.type == "cuda" else f"{platform.machine()} CPU"
        load = f", load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores" if hasattr(os, "getloadavg") else ""
        return RankRecord.from_data(
            {
                "format": "optpipe.record/1",
                "name": self._name[:200],
                "hardware": f"{kind}, torch {torch.__version__}{load}"[:200],
                "rank": dist.get_rank(),
                "processes": dist.get_world_size(),
                "device": first.group_rank,
                "placement": [of_stages[s] for s in range(first.num_stages)],
                "microbatches": len({row.key.microbatch for row in self._timed[0] if row.key.kind == "F"}),
                "runtime": "optpipe" if planned else "torch",
                "clock_error_us": self._clock.error_ns / 1000,
                "stages": [self._stage(stage) for stage in self._stages],
                "steps": [RecordedStep.of(rows) for rows in self._timed],
                "memory": RecordedMemory.of(memory),
                "schedule": self._schedule.schedule if planned and first.group_rank == 0 else None,
            }
        )

    def _stage(self, stage: PipelineStage) -> RecordedStage:
        tensors = [*stage.submod.parameters(), *stage.submod.buffers()]
        gathered = fsdp.gathered_parameters(stage.submod)
        if isinstance(observed := stage.forward_one_chunk, _Observed):
            sent = observed.output_bytes
        else:
            sent = self._schedule.message_bytes[stage.stage_index] if not stage.is_last else 0
        return RecordedStage(
            stage=stage.stage_index,
            parameter_bytes=sum(_bytes(t) * (COPIES_OF_A_PARAMETER if t.requires_grad else 1) for t in tensors),
            gathered_bytes=sum(p.numel() * p.itemsize for p in fsdp.kept_parameters(stage.submod)),
            gradient_bytes=sum(p.numel() * p.itemsize for p in gathered.values() if p.requires_grad),
            message_bytes=0 if stage.is_last else sent,
            splits=compiled_part(stage.submod) is None,
            trained=any(parameter.requires_grad for parameter in stage.submod.parameters()),
            modes=self._modes(stage.stage_index),
        )

    def _modes(self, number: int) -> dict[str, list[int]]:
        """Microbatches of a stage by the name of their mode."""
        found: dict[str, list[int]] = {}
        if isinstance(self._schedule, PlannedSchedule):
            for (stage, microbatch), name in self._schedule.program.modes.items():
                if stage == number:
                    found.setdefault(name, []).append(microbatch)
        return found


def write_records(records: Iterable[RankRecord], folder: Path) -> None:
    """Write the file of each rank."""
    for record in records:
        write_atomically(folder / f"rank{record.rank}.json", record.to_json() + "\n")


def _bytes(tensor: Tensor) -> int:
    """Bytes that this rank holds of a tensor."""
    local = tensor.to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    size: int = local.numel() * local.itemsize
    return size


class _StepMemory:
    """Memory of the actions of one step, by a meter, or on a GPU by CUDA's allocator."""

    def __init__(self, resized: Iterable[torch.UntypedStorage], on_gpu: bool) -> None:
        self.meter: MemoryMeter | None = None
        self._on_gpu = CudaMemoryRecorder() if on_gpu else None
        self._by_meter: _HeldRecorder | None = None
        if not on_gpu:
            self.meter = MemoryMeter()
            self.meter.watch(resized)
            self._by_meter = _HeldRecorder(self.meter)

    @property
    def actions(self) -> ActionRecorder:
        """Recorder of the step."""
        found = self._on_gpu or self._by_meter
        assert found is not None, "one of the two"
        return found

    def rows(self) -> list[Held]:
        """Every action of the step."""
        if self._by_meter is not None:
            return self._by_meter.rows
        assert self._on_gpu is not None, "one of the two"
        uses, before = self._on_gpu.uses(), [0, *(use.after_bytes for use in self._on_gpu.uses())]
        return [_held(use.action.key, b, use.peak_bytes, use.after_bytes) for use, b in zip(uses, before, strict=False)]


class _HeldRecorder:
    """Memory of every action by an open meter. Between actions torch's own schedules free some."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self.rows: list[Held] = []

    def begin(self, device: int, action: Action, _stream: torch.Stream | None = None, /) -> None:
        self._device, self._action = device, action
        self._before = self._meter.peak_bytes[device] = self._meter.live_bytes[device]

    def waited(self) -> None:
        """Waiting takes no memory."""

    def end(self) -> None:
        live, peak = self._meter.live_bytes[self._device], self._meter.peak_bytes[self._device]
        self.rows.append(_held(self._action.key, self._before, peak, live))


def _held(key: Op, before_bytes: int, peak_bytes: int, after_bytes: int) -> Held:
    """A row without negative levels: what was there before the step may be freed in it."""
    return Held(key, max(before_bytes, 0), max(peak_bytes, 0), max(after_bytes, 0))


class _StepsOfTorch:
    """Calls an observer around the steps of a schedule of torch, and its recorder around each call of a stage.

    Public methods are replaced on these objects: `step` of the schedule, and what it calls of its stages.
    """

    def __init__(self, schedule: Any, stages: Sequence[PipelineStage], observer: Recorder) -> None:
        self._schedule, self._stages, self._observer = schedule, stages, observer
        self.actions: ActionRecorder | None = None
        self.meter: MemoryMeter | None = None
        self._step = schedule.step
        schedule.step = self.step
        for stage in stages:
            for name, kind in OPS_OF_TORCH.items():
                setattr(stage, name, _Observed(self, stage, getattr(stage, name), kind))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The schedule's step, observed."""
        self.meter, self.actions = self._observer.begin_step()
        try:
            with self.meter or nullcontext():
                result = self._step(*args, **kwargs)
        finally:
            self.meter = self.actions = None
        self._observer.end_step()
        return result

    def detach(self) -> None:
        """Give the objects their methods back."""
        del self._schedule.step
        for stage in self._stages:
            for name in OPS_OF_TORCH:
                delattr(stage, name)


class _Observed:
    """A method of a stage, with its time or memory recorded as that of an op."""

    def __init__(self, steps: _StepsOfTorch, stage: PipelineStage, method: Callable[..., Any], kind: str) -> None:
        self._steps, self._stage, self._method, self._kind = steps, stage, method, kind
        self.output_bytes = 0

    def __call__(self, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        actions, meter, device = self._steps.actions, self._steps.meter, self._stage.group_rank
        if actions is None:
            return self._method(microbatch, *args, **kwargs)
        split = self._kind == "BW" and not kwargs.get("full_backward", True)
        with meter.on(device) if meter is not None else nullcontext():
            actions.begin(device, Action("B" if split else self._kind, self._stage.stage_index, microbatch))
            result = self._method(microbatch, *args, **kwargs)
            actions.end()
        if self._kind == "F":
            self.output_bytes = sum(_bytes(part) for part in leaves(result) if isinstance(part, Tensor))
        return result


def recording_schedule(
    placement: Sequence[int], microbatches: int, *, offload: bool = True, modes: Sequence[str] = ()
) -> Schedule:
    """A schedule to measure by, for stages on these devices: one microbatch after the other, with all options in turns.

    The options are BW; B and W; BW after O and R, if `offload`; and for each of `modes`, names of activation modes, BW
    after C, CB and W, and CBW. A name with "+offload" behind it adds one more, its copies before C; copies in low
    precision are one, BW after O and R. So every op is alone on its device and no step needs more memory than one
    microbatch; it is as slow as one device. Raises InputError for an empty placement, no microbatch, or fewer
    microbatches than options where there are `modes`.
    """
    options: list[tuple[str, str]] = [("", "BW"), ("", "B W")]
    options += [("", "O R BW")] if offload else []
    options += [(name, "O R BW") for name in modes if name in IN_LOW_PRECISION]
    modes = [name for name in modes if name not in IN_LOW_PRECISION]
    for name in dict.fromkeys(map(without_offload, modes)):
        options += [(name, "C BW"), (name, "CB W"), (name, "CBW")]
    options += [(name, "O R C BW") for name in modes if name.endswith(WITH_OFFLOAD)]
    names = list(dict.fromkeys(name for name, _ in options if name))
    if names and microbatches < len(options):
        detail = f"is {microbatches}, but {len(options)} options are to be recorded. Maybe name fewer modes at once."
        raise InputError([Issue("microbatches", "too_few", detail)])
    copy: dict[str, Any] = {"bytes": 1, "offload_us": 1, "reload_us": 1}
    stage: dict[str, Any] = {"forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
    stage |= {"activation_bytes": 2, "backward_weight_bytes": 1} | ({"offload": copy} if offload else {})
    recomputed = {"kept_bytes": 1, "recompute_us": 1, "segment_bytes": 1}
    entries = [
        {"name": name}
        | ({} if name in IN_LOW_PRECISION else recomputed)
        | ({"offload": copy} if name in IN_LOW_PRECISION or name.endswith(WITH_OFFLOAD) else {})
        for name in names
    ]
    problem = Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "name": RECORDING,
            "microbatches": microbatches,
            "devices": [{"memory_bytes": None}] * (max(placement, default=-1) + 1),
            "stages": [stage | ({"modes": entries} if entries else {}) | {"device": device} for device in placement],
        }
    )
    lists: list[tuple[list[Op], list[Op], list[Op]]] = [([], [], []) for _ in problem.devices]
    numbers = np.zeros((len(placement), microbatches), np.int64)
    for i in range(microbatches):
        name, ops = options[i % len(options)]
        kinds = ops.split()
        for s, device in enumerate(placement):
            compute, out, back = lists[device]
            compute.append(Op("F", s, i))
            if "O" in kinds:
                out.append(Op("O", s, i))
                back.append(Op("R", s, i))
            choices = problem.stages[s].choice_numbers
            numbers[s, i] = choices[name or (OFFLOAD if "O" in kinds else KEPT)]
        for s, device in reversed([*enumerate(placement)]):
            lists[device][0].extend(Op(kind, s, i) for kind in kinds if kind not in ("O", "R"))
    orders = Orders([DeviceOrders(*map(OpArray.of, streams)) for streams in lists], modes=numbers if names else None)
    return timed_schedule(orders, simulate(problem, orders), RECORDING)
