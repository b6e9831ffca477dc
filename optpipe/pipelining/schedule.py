"""PlannedSchedule: a schedule of OptPipe in the place of one of torch's schedule classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks

from optpipe.compile import Program, compile_schedule, fuse_adjacent
from optpipe.errors import OptPipeError, TrainingError
from optpipe.pipelining.gradients import GradientCompletion
from optpipe.pipelining.layouts import Layout
from optpipe.pipelining.stage import LossFunction, Microbatches, SubmoduleStage
from optpipe.runtime import Gloo, Nccl, Pipeline, Transport, learn_messages
from optpipe.runtime.distributed import gather_json
from optpipe.runtime.messages import Spec, size_bytes
from optpipe.runtime.recorder import MemoryMeter, Recorder
from optpipe.schedule import Schedule


class StepObserver(Protocol):
    """Watches steps of a schedule."""

    def begin_step(self) -> tuple[MemoryMeter | None, Recorder | None]:
        """Called before a step; returns what is to observe its actions."""
        ...

    def end_step(self) -> None:
        """Called after a step that has not failed."""
        ...


class PlannedSchedule:
    """A planned schedule of this rank's stages, called as the schedule classes of torch 2.13 are.

    `stages` are this rank's `torch.distributed.pipelining.PipelineStage` objects, in any order; the rank of a process
    in their group is its device in `schedule`, a `Schedule` or the path of one. `loss_fn(output, target)` gives the
    scalar loss of one microbatch; without it `step` runs forwards only. `scale_grads` divides what is in `.grad` by
    the number of microbatches after each step, as torch's classes do: right for a loss that is a mean, and one step
    for each update. The three specs are those of torch, for arguments that are not split, or outputs that are not
    merged, along dimension 0.

    The first step, or the first evaluation, is a collective of the stages' group: it compares the programs of all
    ranks and runs each stage but the last forward once, in evaluation mode, to learn what the stages send. Random
    numbers are drawn from torch's generators, as the layers run; a recomputation draws those of its F again.

    Stages may be wrapped by FSDP2 (`fully_shard`), `replicate` or DistributedDataParallel, and hold DTensors of tensor
    parallelism. Gradients are reduced once a step, after the last W of a stage; with `reduce_every` also after the
    weight gradients of so many microbatches, which then hold no memory until the next come. While `check_gradients` is
    True, which it is for the first step, a parameter whose gradient lacks the share of a microbatch is an error.

    Raises TrainingError where the stages are not those that the schedule places on this rank, and BudgetError where
    the schedule exceeds a budget of its problem.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage] | PipelineStage,
        schedule: Schedule | str | Path,
        loss_fn: LossFunction | None = None,
        scale_grads: bool = True,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        reduce_every: int | None = None,
    ) -> None:
        self._stages = [stages] if isinstance(stages, PipelineStage) else list(stages)
        self.schedule = schedule if isinstance(schedule, Schedule) else Schedule.load(schedule)
        _check_stages(self._stages, self.schedule)
        self._loss_fn, self.scale_grads = loss_fn, scale_grads
        self._args_chunk_spec, self._kwargs_chunk_spec = args_chunk_spec, kwargs_chunk_spec
        self._output_merge_spec = output_merge_spec
        if reduce_every is not None and reduce_every < 1:
            raise TrainingError(f"reduce_every is {reduce_every} but must be at least 1, or None.")
        self._reduce_every = reduce_every
        self._program = self._compiled(self.schedule)
        self._pipeline: Pipeline | None = None
        self._runtime_stages: dict[int, SubmoduleStage] = {}
        self._messages: list[Spec] = []
        self._sends: Transport | None = None
        self.check_gradients = True
        self.observer: StepObserver | None = None
        for stage in self._stages:
            stage.stage_index_to_group_rank = dict(enumerate(self._program.placement))

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """One step of the schedule: every microbatch forward and backward, gradients added to `.grad`.

        Either whole batches, which are split into microbatches: `args` for the first stage, `kwargs` for every stage
        of this rank, `target` for the loss. Or lists with an entry for each microbatch: `arg_mbs`, `kwarg_mbs`,
        `target_mbs`. Ranks without the first or the last stage leave out what is for these. `losses` is emptied and
        gets the loss of each microbatch on the rank of the last stage; `loss_kwargs` are passed on to `loss_fn`.

        Returns the merged outputs on the rank of the last stage if `return_outputs`, else None. Raises TrainingError
        where arguments do not fit, or where an action of the schedule fails: its message shows which. Raises
        RunFailedError where another process has ended.
        """
        if self._loss_fn is not None and not torch.is_grad_enabled():
            raise TrainingError("step() computes gradients, but runs under torch.no_grad(). Maybe call eval().")
        batch = self._begin(args, kwargs, target, (arg_mbs, kwarg_mbs, target_mbs), losses, loss_kwargs, return_outputs)
        if self._loss_fn is None:
            return self._evaluate(batch, losses)
        if batch.targets is None and self._has_last:
            raise TrainingError("target is missing, which the loss of the last stage needs. Maybe call eval().")
        pipeline = self._prepared(batch)
        stages = self._runtime_stages.values()
        try:
            if self.check_gradients:
                for stage in stages:
                    stage.watch_gradients()
            meter, actions = self.observer.begin_step() if self.observer is not None else (None, None)
            pipeline.run(batch.args, batch.targets or batch.args, meter, actions, zero_gradients=False)
            for stage in stages:
                stage.check_gradients()
        finally:
            for stage in stages:
                stage.forget_gradients()
            self._forget_batch()
        self.check_gradients = False
        if self.observer is not None:
            self.observer.end_step()
        return self._end(batch, losses)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Every microbatch forward only; modules stay in the mode that they are in.

        Takes and returns the same as `step`; without a target no loss is computed. Touches no gradient.
        """
        batch = self._begin(args, kwargs, target, (arg_mbs, kwarg_mbs, target_mbs), losses, loss_kwargs, return_outputs)
        return self._evaluate(batch, losses)

    def replan(self, schedule: Schedule | str | Path | None = None) -> bool:
        """Go on by another schedule from the next step on, if a process gives one; returns whether one did.

        A collective of all processes, between steps. The schedule of the lowest rank that gives one counts, for all
        replicas of the pipeline. It must have the stages and the placement of the present one; the number of
        microbatches may differ. Raises TrainingError in all processes where it does not fit: nothing is changed then.
        """
        given = Schedule.load(schedule) if isinstance(schedule, str | Path) else schedule
        device = self._stages[0].device
        data = next((found for found in gather_json(given and given.to_data(), device=device) if found), None)
        if data is None:
            return False
        fault, planned, program = "", Schedule.from_data(data), self._program
        try:
            _check_stages(self._stages, planned)
            program = self._compiled(planned)
        except OptPipeError as error:
            fault = str(error)
        if fault := next(filter(None, gather_json(fault, device=device)), ""):
            raise TrainingError(f"the schedule does not fit: {fault}")
        if self._sends is not None:
            program = self._fused_where_compiled(program, planned)
            self._pipeline = self._pipeline_of(program, self._sends)
        self.schedule, self._program = planned, program
        return True

    @property
    def program(self) -> Program:
        """The compiled schedule: one list of actions per device."""
        return self._program

    @property
    def stages(self) -> Sequence[PipelineStage]:
        """The stages of this rank."""
        return self._stages

    @property
    def message_bytes(self) -> Sequence[int]:
        """Bytes that a microbatch sends from each stage to the next; empty before the first step."""
        return [size_bytes(spec) for spec in self._messages]

    @property
    def _n_microbatches(self) -> int:
        return self.schedule.problem.microbatches

    def _compiled(self, schedule: Schedule) -> Program:
        if schedule.problem.slice_count > 1:
            raise TrainingError(
                f"the schedule cuts sequences into {schedule.problem.slice_count} slices, which PlannedSchedule does "
                "not run: its stages are torch's. Maybe train with 'optpipe train', or solve without slices."
            )
        if passes := ", ".join(schedule.problem.pass_names):
            raise TrainingError(
                f"the schedule has the spread passes {passes}, which PlannedSchedule does not run: its stages are "
                "torch's. Maybe train with 'optpipe train', or solve without spread passes."
            )
        return compile_schedule(
            schedule, reduce_gradients=True, gather_parameters=True, reduce_every=self._reduce_every
        )

    @property
    def _has_last(self) -> bool:
        return any(stage.is_last for stage in self._stages)

    def _begin(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        lists: tuple[list[tuple[Any, ...]] | None, list[dict[str, Any]] | None, list[Any] | None],
        losses: list[Tensor] | None,
        loss_kwargs: Mapping[str, Any] | None,
        return_outputs: bool,
    ) -> Microbatches:
        """The microbatches of a call, in either form."""
        if losses is not None and not isinstance(losses, list):
            raise TrainingError(f"losses is a {type(losses).__name__} but must be a list, which is filled.")
        arg_mbs, kwarg_mbs, target_mbs = lists
        if any(given is not None for given in lists):
            if args or kwargs or target is not None:
                raise TrainingError(
                    "a whole batch and lists of microbatches are given at once. Maybe leave out one of "
                    f"{[*kwargs, *(['target'] if target is not None else []), *(['args'] if args else [])]} and "
                    "arg_mbs, kwarg_mbs, target_mbs."
                )
        else:
            arg_mbs, kwarg_mbs = self._split(args, kwargs, self._args_chunk_spec, self._kwargs_chunk_spec)
            if target is not None:
                target_mbs = [chunk for (chunk,) in self._split((target,), {}, None, None)[0]]
        n = self._n_microbatches
        for name, found in (("arg_mbs", arg_mbs), ("kwarg_mbs", kwarg_mbs), ("target_mbs", target_mbs)):
            if found is not None and len(found) != n:
                raise TrainingError(f"{name} has {len(found)} entries but the schedule has {n} microbatches.")
        return Microbatches(
            arg_mbs if arg_mbs is not None else [()] * n,
            kwarg_mbs if kwarg_mbs is not None else [{}] * n,
            target_mbs,
            loss_kwargs or {},
            return_outputs and self._has_last,
        )

    def _split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], args_spec: Any, kwargs_spec: Any
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """A whole batch in microbatches, as torch splits it."""
        n = self._n_microbatches
        if not args and not kwargs:
            return [()] * n, [{}] * n
        arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(args, kwargs, n, args_spec, kwargs_spec)
        if len(arg_mbs) != n:
            raise TrainingError(
                f"the batch splits into {len(arg_mbs)} microbatches but the schedule has {n}. Maybe its dimension 0 is "
                "smaller than that, or its arguments are split along another one: see args_chunk_spec."
            )
        return arg_mbs, kwarg_mbs

    def _evaluate(self, batch: Microbatches, losses: list[Tensor] | None) -> Any:
        try:
            self._prepared(batch).evaluate(batch.args, batch.targets or batch.args, change_mode=False)
        finally:
            self._forget_batch()
        return self._end(batch, losses)

    def _forget_batch(self) -> None:
        """Hold nothing of a batch between two calls."""
        nothing = Microbatches()
        for stage in self._runtime_stages.values():
            stage.batch = nothing

    def _end(self, batch: Microbatches, losses: list[Tensor] | None) -> Any:
        """Hand losses and outputs to the caller."""
        if losses is not None and self._has_last:
            losses[:] = [batch.losses[i] for i in sorted(batch.losses)]
        if not batch.keeps_outputs:
            return None
        return merge_chunks([batch.outputs[i] for i in range(self._n_microbatches)], self._output_merge_spec)

    def _prepared(self, batch: Microbatches) -> Pipeline:
        """The pipeline, put together at the first call, with its stages set to a batch."""
        if self._pipeline is None:
            self._runtime_stages = {stage.stage_index: SubmoduleStage(stage, self._loss_fn) for stage in self._stages}
        for stage in self._runtime_stages.values():
            stage.batch = batch
        if self._pipeline is None:
            self._pipeline = self._put_together(batch)
        return self._pipeline

    def _put_together(self, batch: Microbatches) -> Pipeline:
        """A collective of the stages' group."""
        first, stages = self._stages[0], self._runtime_stages
        self._program = self._fused_where_compiled(self._program, self.schedule)
        digests = self._gather(self._program.digest)
        if len(set(digests)) > 1:
            other = next(rank for rank, digest in enumerate(digests) if digest != self._program.digest)
            raise TrainingError(
                f"the schedule of rank {first.group_rank} is not that of rank {other} of the pipeline. "
                "Maybe each rank solved it anew: solve once and hand all of them one file."
            )
        try:
            self._messages = learn_messages(
                stages, len(self._program.placement), batch.args[0], None, self._gather_specs()
            )
        except OptPipeError:
            raise
        except Exception as error:
            raise TrainingError(
                f"a stage of rank {first.group_rank} failed at the first microbatch, whose output shapes the next "
                f"stage must know: {type(error).__name__}: {error}"
            ) from error
        for stage in stages.values():
            stage.gather_once()
        self._sends = self._transport()
        return self._pipeline_of(self._program, self._sends)

    def _fused_where_compiled(self, program: Program, schedule: Schedule) -> Program:
        """The program with B and W side by side as one on stages that torch.compile has taken. A collective."""
        own = [s for s, stage in self._runtime_stages.items() if not stage.splits]
        compiled = [s for found in self._gather(own) for s in found]
        return fuse_adjacent(program, schedule.problem, compiled) if compiled else program

    def _pipeline_of(self, program: Program, transport: Transport) -> Pipeline:
        reductions = Counter(a.stage for a in program.actions() if a.kind in ("REDUCE_PART", "REDUCE"))
        divisor = program.microbatches if self.scale_grads else 1
        return Pipeline(
            program,
            self._runtime_stages,
            [self._stages[0].group_rank],
            transport,
            self._messages,
            sync=GradientCompletion(self._runtime_stages, divisor, reductions),
        )

    def _gather_specs(self) -> Callable[[Any], list[Any]]:
        """For `learn_messages`, which asks for the messages of one stage after the other: with their layouts."""
        numbers = iter(range(len(self._program.placement)))

        def gather(spec: Any) -> list[Any]:
            s = next(numbers)
            own = None
            if s in self._runtime_stages:
                own = [layout and layout.to_data() for layout in self._runtime_stages[s].sends]
            found = self._gather([spec, own])
            [layouts] = [sent for _, sent in found if sent is not None]
            if s + 1 in self._runtime_stages:
                self._runtime_stages[s + 1].receives = [data and Layout.from_data(data) for data in layouts]
            return [spec for spec, _ in found]

        return gather

    def _gather(self, value: Any) -> list[Any]:
        """The values of all ranks of the pipeline."""
        first = self._stages[0]
        return gather_json(value, first.group, first.device)

    def _transport(self) -> Transport:
        first = self._stages[0]
        if first.device.type != "cuda":
            return Gloo(first.group)
        mine = dist.get_process_group_ranks(first.group)
        pipelines = {tuple(ranks) for ranks in gather_json(mine, device=first.device)}
        return Nccl(self._program, first.device, replicas=sorted(map(list, pipelines)))


def _check_stages(stages: Sequence[PipelineStage], schedule: Schedule) -> None:
    """Raise TrainingError unless the stages are those that the schedule places on this rank."""
    if not stages or not all(isinstance(stage, PipelineStage) for stage in stages):
        kinds = [type(stage).__name__ for stage in stages]
        raise TrainingError(f"stages is {kinds} but must be this rank's PipelineStage objects, at least one.")
    placement = [stage.device for stage in schedule.problem.stages]
    first = stages[0]
    if first.num_stages != len(placement):
        raise TrainingError(
            f"stages[0].num_stages is {first.num_stages} but the schedule has {len(placement)} stages. "
            "Maybe cut the model into as many stages as the problem has that was solved."
        )
    if first.group_size != len(schedule.problem.devices):
        raise TrainingError(
            f"the group of stages[0] has {first.group_size} ranks but the schedule has {len(schedule.problem.devices)} "
            "devices. Maybe group is missing in PipelineStage: by default it is all ranks."
        )
    found = sorted(stage.stage_index for stage in stages)
    placed = [s for s, device in enumerate(placement) if device == first.group_rank]
    if found != placed:
        raise TrainingError(
            f"the stages of rank {first.group_rank} are {found} but the schedule places {placed} there: its placement "
            f"is {placement}. Maybe it was solved for another one ('loop', 'v')."
        )
    for stage in stages:
        if stage.dw_builder is not None:
            raise TrainingError(
                f"stages[{stage.stage_index}].dw_builder is set, which PlannedSchedule does not call: it splits "
                "backwards itself. Maybe leave it out."
            )
