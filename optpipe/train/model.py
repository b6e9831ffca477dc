"""Model of a run: this process's stages with their optimizers, and the pipeline that executes the schedule."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn

from optpipe.assignment import Places
from optpipe.compile import Program, compile_schedule
from optpipe.compile.memory import memory_steps
from optpipe.errors import OptPipeError, TrainingError
from optpipe.models.loss import PerToken
from optpipe.problem import Problem
from optpipe.runtime import (
    Gloo,
    MessageShapes,
    Nccl,
    Pipeline,
    Stage,
    Transport,
    learn_messages,
    learn_shapes,
    local_transport,
)
from optpipe.runtime.collectives import Collectives, GlooCollectives, LocalCollectives
from optpipe.runtime.gradient_sync import GradientSync, with_groups
from optpipe.runtime.messages import Spec, Tree, map_leaves, size_bytes, spec_text
from optpipe.runtime.probe import unchanged
from optpipe.runtime.recorder import MemoryMeter, Recorder
from optpipe.runtime.shapes import SliceMessages
from optpipe.runtime.shared_parameters import (
    Place,
    SharedParameter,
    hold_once,
    place_text,
    shared_buffers,
    shared_parameters,
    with_own_modules,
)
from optpipe.runtime.slices import SlicedLoss, check_slices, cut_sequences, sequence_length, slice_lengths
from optpipe.runtime.stage import check_splits
from optpipe.runtime.tied_rows import TiedRows
from optpipe.runtime.transport import peer_errors
from optpipe.runtime.vocabulary import VocabularyShard
from optpipe.runtime.weight_gradients import accumulate_in_float32, compiler_failure
from optpipe.schedule import Schedule
from optpipe.train.config import TrainingConfig
from optpipe.train.launch import Launch
from optpipe.train.lengths import SizeCosts, Sizes, tokens_of, varied_samples
from optpipe.train.tasks import build_task
from optpipe.train.tasks.base import Batch, Task
from optpipe.train.update import StepOutcome, SumsLayout, Updates
from optpipe.train.vocabulary import DividedLayer, check_activation, divided_layer

LOG = logging.getLogger("optpipe.train")


class Model:
    """A task cut into the schedule's stages, of which this process keeps its own.

    `stages` and `optimizers` (one a stage, none for a stage without parameters to update): this process's, by stage
    number. `shapes`: messages as functions of a microbatch's sizes, where these differ; then `messages` are those of
    the first one, and `size_costs` says what a size costs. `reference`: size of the microbatch whose costs the
    schedule's problem states. `recorded_sizes`: those of the microbatches in each place, in each run with a recorder.
    `shared`: parameters that several stages of the whole model hold; each is one parameter, updated once by every
    process that has it, and counted once in `parameters`. `shared_buffers`: places of buffers that they share.
    `vocabulary`: the layer of the last stage, where the schedule divides it over all devices; then the last message is
    what that stage gives to it. An embedding that is tied to it is not among `shared` but among `followers`.

    `optimistic`: update before the global norm is known; None: as the config says, under torchrun alone. `task`: None
    builds the task of the config.
    """

    def __init__(
        self,
        config: TrainingConfig,
        program: Program,
        launch: Launch,
        *,
        optimistic: bool | None = None,
        task: Task | None = None,
    ) -> None:
        assert config.schedule is not None, "a program has been compiled from it"
        self.config, self.program, self.launch = config, program, launch
        self.schedule: Schedule = config.schedule
        self.task = task or build_task(config, len(program.placement), program.microbatches, launch)
        self.devices, self.hardware = launch.own_devices, launch.hardware
        self.vocabulary: DividedLayer | None = None
        self._shards: Mapping[int, VocabularyShard] = {}
        self._tied: TiedRows | None = None
        self.stages = self._build_stages()
        self.shapes: MessageShapes | None = None
        self._slice_lengths: Sequence[int] = ()
        self._slice_messages: Sequence[Sequence[Spec]] = ()
        self.messages = self._learn_messages()
        placement = program.placement
        self._sync: GradientSync | None = None
        if config.sums_gradients or self.shared:
            with peer_errors("the groups of processes that share parameters"):
                shared = with_groups(self.shared, lambda stage: launch.ranks_of(placement[stage]))
            self._sync = GradientSync(self.stages, launch.same_device, shared)
        self.size_costs, self.reference = SizeCosts(), self.task.reference
        self.recorded_sizes: list[list[Sizes]] = []
        self._excess_bytes = 0
        self._places = self._build_places()
        self.pipeline = self._pipeline()
        self._updates = Updates(
            config.optimizer,
            config.steps,
            self.stages,
            launch,
            SumsLayout(self.microbatches, launch.replicas, len(placement), launch.replica),
            shared=self.shared,
            followers=self.followers,
            changed=self._tied.gather_rows if self._tied else lambda: None,
            optimistic=config.optimizer.optimistic and launch.distributed if optimistic is None else optimistic,
        )
        self.optimizers = self._updates.optimizers
        self._step_number = 0
        self._term_names: tuple[str, ...] | None = None
        self._own_terms: Tensor | None = None
        self._tokens: dict[int, int] = {}

    @property
    def microbatches(self) -> int:
        """Microbatches of a step in one replica: those of all runs of the schedule."""
        return self.program.microbatches * self.config.accumulate

    @property
    def followers(self) -> list[Place]:
        """Places of parameters that are updated, counted and saved by their rows, which other parameters are."""
        return [self.vocabulary.tied] if self.vocabulary and self.vocabulary.tied else []

    @property
    def problem(self) -> Problem:
        """Problem of the schedule in use."""
        return self.schedule.problem

    @property
    def step_number(self) -> int:
        """Number of the next step. Setting it, between two settled steps, also sets the stages' random numbers."""
        return self._step_number

    @step_number.setter
    def step_number(self, step: int) -> None:
        assert not self._updates.pending, "the last step is settled"
        self._set_step(step)

    def step(
        self,
        batch: Batch,
        *,
        recorder: Recorder | None = None,
        meter: MemoryMeter | None = None,
        requests: Callable[[], Sequence[bool]] = tuple,
    ) -> list[StepOutcome]:
        """Run step `step_number` on its batch (of all replicas; this one runs its part) and update the weights.

        Returns the outcomes that have become known: this step's, or with post-validation that of the step before.
        `requests` is called when gradients are ready; its answers, the same number in each step, reach all processes
        with the step's sums (`take_requests`).
        """
        begin = perf_counter()
        self._tokens[self._step_number] = self._tokens_of(batch[0])
        self._set_step(self._step_number)
        losses = self.run(
            *self.own_part(batch),
            meter=meter,
            recorder=recorder,
            validate=self._updates.validate if self._updates.pending else None,
            leave_sends=self._updates.leaves_open,
        )
        self._updates.update(self._step_number, losses, requests(), self._loss_terms(losses))
        self._updates.took(perf_counter() - begin)
        self._set_step(self._step_number + 1)
        return self._updates.take_outcomes()

    def run(
        self,
        inputs: Sequence[Tree],
        targets: Sequence[Tree],
        meter: MemoryMeter | None = None,
        recorder: Recorder | None = None,
        *,
        validate: Callable[[], bool] | None = None,
        leave_sends: bool = False,
    ) -> Tensor:
        """Run the schedule on this replica's part of a batch, as often as the config says; gradients add up.

        Sums over replicas and stages are of the last run alone, which has the gradients of all. Meter and recorder see
        the first. Returns losses and takes options as `Pipeline.run`.
        """
        count, m, losses = self.config.accumulate, self.program.microbatches, []
        terms, last_stage = [], self.stages.get(len(self.program.placement) - 1)
        for n in range(count):
            part, last = slice(n * m, (n + 1) * m), n == count - 1
            order = self.order_of(inputs[part])
            self._set_random(n, order)
            if self._sync:
                self._sync.paused = not last
            if recorder is not None and self.shapes is not None and not n:
                self.recorded_sizes.append([Sizes.of(inputs[i]) for i in order or range(m)])
            in_order = self.pipeline.run(
                *self.cut(
                    inputs[part] if order is None else [inputs[n * m + i] for i in order],
                    targets[part] if order is None else [targets[n * m + i] for i in order],
                ),
                meter=None if n else meter,
                recorder=None if n else recorder,
                validate=None if n else validate,
                leave_sends=leave_sends and last,
                zero_gradients=not n,
            )
            of_terms = last_stage.loss_terms.values if last_stage else None
            if (slices := self.program.slices) > 1:
                in_order = in_order.view(m, slices).sum(1)
                of_terms = (
                    None if of_terms is None else torch.stack([of_terms[q::slices] for q in range(slices)]).sum(0)
                )
            if order is not None:
                back = np.argsort(order)
                in_order, of_terms = in_order[back], None if of_terms is None else of_terms[back]
            losses.append(in_order)
            if of_terms is not None:
                terms.append(of_terms)
        if self._tied is not None:
            self._tied.add_gradients()
        self._own_terms = torch.cat(terms) if terms else None
        return torch.cat(losses)

    def _loss_terms(self, losses: Tensor) -> Mapping[str, Tensor]:
        """Terms of the losses of the last run by name, zeros where another process has them.

        Collective in the first step, in which all processes learn the names. Raises TrainingError where those of
        replicas differ.
        """
        if self._term_names is None:
            last_stage = self.stages.get(len(self.program.placement) - 1)
            own = None if last_stage is None else list(last_stage.loss_terms.names or ())
            first, *others = [names for names in self.launch.gather(own) if names is not None]
            for other in others:
                if other != first:
                    raise TrainingError(
                        f"the loss has the terms {first} in one replica but {other} in another. Maybe return zero for "
                        "what does not apply."
                    )
            self._term_names = tuple(first)
        columns = [torch.zeros_like(losses)] * len(self._term_names)
        if self._own_terms is not None:
            columns = list(self._own_terms.unbind(1))
        return dict(zip(self._term_names, columns, strict=True))

    def evaluate(self, inputs: Sequence[Tree], targets: Sequence[Tree]) -> Tensor:
        """Losses of this replica's microbatches, forward only (`Pipeline.evaluate`)."""
        losses = self.pipeline.evaluate(*self.cut(inputs, targets))
        return losses if self.program.slices == 1 else losses.view(len(inputs), self.program.slices).sum(1)

    def cut(self, inputs: Sequence[Tree], targets: Sequence[Tree]) -> tuple[Sequence[Tree], Sequence[Tree]]:
        """Inputs and targets of the schedule's units: of the slices of each microbatch, where it has slices.

        The target of a slice comes with its share of the sequence, unless the loss is one by tokens.
        """
        if self.program.slices == 1:
            return inputs, targets
        lengths = self._slice_lengths
        of_inputs = [part for microbatch in inputs for part in cut_sequences(microbatch, lengths)]
        of_targets = [part for target in targets for part in cut_sequences(target, lengths)]
        if not isinstance(self.task.loss, PerToken):
            shares = [length / sum(lengths) for length in lengths] * len(targets)
            of_targets = [t if t is None else (t, share) for t, share in zip(of_targets, shares, strict=True)]
        return of_inputs, of_targets

    def order_of(self, inputs: Sequence[Tree]) -> Sequence[int] | None:
        """The microbatch that runs in the place of each microbatch of the schedule, of one run; None: each in its own.

        A function of the sizes of the inputs alone, so that every process of a pipeline finds the same.
        """
        sizes = [Sizes.of(microbatch) for microbatch in inputs] if self._places else []
        if self._places is None or all(size == sizes[0] for size in sizes):
            return None
        factors = self.size_costs.factors(sizes, self.reference)
        order = self._places.assign(factors)
        excess = self._places.excess_bytes(factors, order)
        if excess > self._excess_bytes and self.launch.rank == 0:
            self._excess_bytes = excess
            LOG.warning(
                "the microbatches of step %d need %s bytes more than the schedule's budget of a device, in any order "
                "that was tried. Maybe solve with less memory, or split long microbatches.",
                self._step_number,
                f"{excess:,}",
            )
        return order

    def take_tokens(self, step: int) -> int:
        """Tokens of the batch of a step, of all replicas. Those of other replicas that read their own count as ours."""
        return self._tokens.pop(step, 0)

    def _tokens_of(self, inputs: Sequence[Tree]) -> int:
        """Tokens of a batch's inputs."""
        if self.shapes is None:
            return self.task.tokens * len(inputs)
        known = [tokens_of(microbatch) for microbatch in inputs if microbatch is not None]
        return sum(known) * len(inputs) // len(known)

    def settle(self) -> list[StepOutcome]:
        """Validate the last update, in all processes together. Returns its outcome if it was not known."""
        if self._updates.pending:
            self._updates.validate()
        self.pipeline.settle()
        return self._updates.take_outcomes()

    def take_requests(self) -> list[bool]:
        """Requests of any process in the steps whose outcomes became known since the last call; empty if none did."""
        return self._updates.take_requests()

    def swap(self, schedule: Schedule, reference: Sizes | None = None) -> None:
        """Switch to this schedule, in all processes together and between two settled steps.

        `reference`: size of the microbatch whose costs its problem states, if that is another one.

        Stages, optimizers and numbers stay: neither the random numbers of a microbatch nor the order in which its
        gradients add up depends on the schedule. Raises TrainingError if placement or microbatches differ or processes
        disagree, and what `compile_schedule` raises; the old schedule then stays in use.
        """
        assert not self._updates.pending, "swaps are between settled steps"
        program, old = compile_schedule(schedule, reduce_gradients=self.config.sums_gradients), self.program
        for field, theirs, ours in (
            ("placement", program.placement, old.placement),
            ("microbatches", program.microbatches, old.microbatches),
            ("slices", program.slices, old.slices),
        ):
            if theirs != ours:
                raise TrainingError(
                    f"the new schedule's {field} is {theirs} but the model runs with {ours}. "
                    "Maybe resume a checkpoint with the new schedule instead."
                )
        digests = self.launch.gather(program.digest)
        if any(digest != program.digest for digest in digests):
            raise TrainingError("processes were given different schedules to go on with. Maybe a solve was not shared.")
        self.program, self.schedule = program, schedule
        self.reference = reference or self.reference
        self._places = self._build_places()
        self.pipeline = self._pipeline()

    def own_part(self, batch: Batch) -> Batch:
        """The microbatches of this replica, on this process's hardware."""
        m = self.microbatches
        part = slice(self.launch.replica * m, (self.launch.replica + 1) * m)
        return moved((batch[0][part], batch[1][part]), self.hardware)

    def messages_at(self, stage: int, microbatch: Tree | None = None) -> tuple[Spec | None, Spec | None]:
        """The messages before and after a stage, None at the ends of the model: of the microbatch with this input."""
        messages = self.messages if self.shapes is None or microbatch is None else self.shapes.of(microbatch)
        return messages[stage - 1] if stage else None, messages[stage] if stage < len(messages) else None

    @property
    def message_bytes(self) -> list[int | Sequence[int]]:
        """Size of the message at each boundary; of each unit where slices differ."""
        if not self._slice_messages:
            return [size_bytes(spec) for spec in self.messages]
        columns = zip(*self._slice_messages, strict=True)
        return [[size_bytes(spec) for spec in column] * self.program.microbatches for column in columns]

    def messages_of_slices(self, stage: int) -> list[tuple[Spec | None, Spec | None]]:
        """The messages before and after a stage of each slice of a microbatch, None at the ends of the model."""
        return [
            (messages[stage - 1] if stage else None, messages[stage] if stage < len(messages) else None)
            for messages in self._slice_messages
        ]

    def mean_loss(self, losses: Tensor) -> float:
        """Mean loss of the batch, from the sum of all processes' losses, shape (microbatches,)."""
        return float(losses.mean()) / self.launch.replicas

    def _set_step(self, step: int) -> None:
        self._step_number = step
        self._set_random(0)

    def _set_random(self, run: int, order: Sequence[int] | None = None) -> None:
        """Set the random numbers of the stages to those of a run of the schedule in the step, and its `order_of`."""
        for stage in self.stages.values():
            if stage.random:
                stage.random.step = self._step_number * self.config.accumulate + run
                stage.random.numbers = order

    def _build_stages(self) -> dict[int, Stage]:
        placement, config = self.program.placement, self.config
        needed = {s for s, d in enumerate(placement) if d in self.devices}
        if self.program.vocabulary is not None:
            needed.add(len(placement) - 1)  # for the rows of this process
        modules = with_own_modules(self.task.build_stages(needed))
        self.shared = self._agreed(shared_parameters(modules), modules)
        self.shared_buffers = shared_buffers(modules)
        self.parameters = sum(p.numel() for p in {p for module in modules for p in module.parameters()})
        last, gradient_scale = len(modules) - 1, 1 / (self.launch.replicas * self.microbatches)
        weight: Tensor | None = None
        if self.program.vocabulary is not None:
            self.vocabulary, weight = divided_layer(self.program, modules, self.task)
            self.shared = [shared for shared in self.shared if self.vocabulary.head not in shared.places]
        for s, module in enumerate(modules):  # of all processes, before any compiles what would be refused
            check_splits(s, module, self.program.kinds_of(s))
            check_slices(s, module, self.program.slices)
        own = {s: module.to(self.hardware) for s, module in enumerate(modules) if placement[s] in self.devices}
        if self.vocabulary is not None and weight is not None:
            self._shards = self.vocabulary.shards(weight, own, gradient_scale)
            if self.launch.distributed:
                with peer_errors("the group of a tied vocabulary layer"):
                    self._tied = self.vocabulary.tied_rows(own, placement)
        hold_once(self.shared, own, placement)
        for module in own.values():
            accumulate_in_float32(module)
        slices, loss = self.program.slices, self.task.loss
        if slices > 1 and not isinstance(loss, PerToken):
            loss = SlicedLoss(loss)
        return {
            s: Stage(
                module,
                first=s == 0,
                loss=loss if s == last and self.vocabulary is None else None,
                gradient_scale=gradient_scale,
                autocast=config.model.torch_autocast,
                seed=config.seed + self.launch.replica,
                slices=slices,
            )
            for s, module in own.items()
        }

    def _agreed(self, shared: list[SharedParameter], modules: Sequence[nn.Module]) -> list[SharedParameter]:
        """Raise TrainingError unless all processes share the same parameters, with equal values; return them."""
        if not self.launch.distributed:
            return shared
        digests = {}
        for parameter in shared:
            s, name = parameter.places[0]
            digests[str(parameter)] = _digest(modules[s].get_parameter(name))
        digests_of_all = self.launch.gather(digests)
        first_digests: dict[str, tuple[int, str]] = {}
        for rank, theirs in enumerate(digests_of_all):
            for text in digests_of_all[0].keys() ^ theirs.keys():
                one, other = (0, rank) if text in digests_of_all[0] else (rank, 0)
                raise TrainingError(
                    f"{text} is one parameter on rank {one} but not on rank {other}. Maybe share it after its stages "
                    "have been given their memory, and in every process."
                )
            for text, digest in theirs.items():
                first, expected = first_digests.setdefault(text, (rank, digest)) if digest else (rank, digest)
                if digest != expected:
                    raise TrainingError(
                        f"{text} is one parameter, but its values on rank {rank} are not those on rank {first}. Maybe "
                        "draw them by torch's generator, which is seeded alike in every process, or seed the other one."
                    )
        return shared

    def _learn_messages(self) -> list[Spec]:
        """Messages between stages for a microbatch of step 0. Raises TrainingError if a stage fails on it."""
        inputs, targets = self.task.batch(0)
        [[microbatch], [target]] = moved((inputs[:1], targets[:1]), self.hardware)
        count, gather = len(self.program.placement), self.launch.gather_pipeline
        if self.vocabulary is not None:
            count += 1
        try:
            if self.config.model.varies:
                varied = [map_leaves(lambda leaf: leaf.to(self.hardware), x) for x in varied_samples(inputs)]
                self.shapes = learn_shapes(self.stages, count, varied, gather)
            if self.program.slices > 1:
                if self.config.model.varies:
                    raise TrainingError(
                        "the schedule has slices of sequences, but model.lengths is 'varying'. Maybe train on "
                        "sequences of one length, or solve without slices."
                    )
                slices = self.problem.slices
                shares = (slices and slices.factors.bytes) or [1] * self.program.slices
                self._slice_lengths = slice_lengths(sequence_length(microbatch), shares)
                for stage in self.stages.values():
                    stage.sequences.length = sum(self._slice_lengths)
                units, of_units = self.cut([microbatch], [target])
                self._slice_messages = [
                    learn_messages(self.stages, count, x, y, gather) for x, y in zip(units, of_units, strict=True)
                ]
                microbatch, target, messages = units[0], of_units[0], [*self._slice_messages[0]]
            else:
                messages = learn_messages(self.stages, count, microbatch, target, gather)
            if self.config.evaluate:
                evaluated = learn_messages(self.stages, count, microbatch, target, gather, evaluates=True)
                for s, (one, other) in enumerate(zip(messages, evaluated, strict=True)):
                    if one != other:
                        raise TrainingError(
                            f"stages[{s}] of {self.task.name} returns {spec_text(one)} in training but "
                            f"{spec_text(other)} in evaluation, of which evaluate asks for {self.config.evaluate} "
                            "batches. Maybe return the same in both, zeros for what evaluation does not need, or leave "
                            "evaluate out."
                        )
            if self.vocabulary is not None:
                check_activation(messages[-1], self.vocabulary.spec.shape[1])
            self._refuse_changed_buffers(messages, microbatch, target)
            return messages
        except OptPipeError:
            raise
        except Exception as error:
            if failure := compiler_failure(error):
                raise TrainingError(
                    f"torch.compile fails on a stage of {self.task.name}: {failure}. Maybe train without torch.compile."
                ) from error
            raise TrainingError(
                f"a stage of {self.task.name} fails on what it receives: {type(error).__name__}: {error}. "
                "Maybe the sizes of two stages differ; 'optpipe profile' says of which."
            ) from error

    def _refuse_changed_buffers(self, messages: Sequence[Spec], microbatch: Tree, target: Tree) -> None:
        """Raise TrainingError in every process where a forward in training mode changes a buffer that stages share.

        In one process the stages would change it in an order that depends on the schedule; in several, each process
        would change a copy of its own. One forward of each stage that has such a buffer shows it: by the values, or by
        autograd's count of changes in place, which batch norm's kernel goes around. A change that only a later
        microbatch makes is not noticed.
        """
        changed = []
        for s, stage in self.stages.items():
            names = {name: places for places in self.shared_buffers for number, name in places if number == s}
            if not names:
                continue
            buffers = [stage.module.get_buffer(name) for name in names]
            before = [(buffer._version, _digest(buffer)) for buffer in buffers]
            received = microbatch
            if s:  # ones, because zeros would leave a mean that begins with zero as it is
                received = map_leaves(lambda spec: spec.empty(self.hardware).fill_(spec.has_gradient), messages[s - 1])
            with unchanged([stage]):
                stage.forward(0, received, target if s == len(messages) else None, offloads=False)
                stage.clear()
                for buffer, (name, places), old in zip(buffers, names.items(), before, strict=True):
                    if (buffer._version, _digest(stage.module.get_buffer(name))) != old:
                        changed.append((s, " = ".join(map(place_text, places))))
        for rank, found in enumerate(self.launch.gather(changed)):
            for s, places in found:
                where = f" on rank {rank}" if self.launch.distributed else ""
                raise TrainingError(
                    f"{places} is one buffer, but the forward of stages[{s}] changes it{where}, so it cannot be kept "
                    "equal on several stages. Maybe give each stage a buffer of its own."
                )

    def _build_places(self) -> Places | None:
        """Places of the schedule's microbatches, where sizes are others in every step."""
        if self.shapes is None:
            return None
        return Places(self.problem, self.schedule.orders, memory_steps(self.program, self.problem))

    def _pipeline(self) -> Pipeline:
        if not self.launch.distributed:
            transport: Transport = local_transport(self.hardware)
        elif self.hardware.type == "cuda":
            with peer_errors("the groups in which GPUs send"):
                transport = Nccl(self.program, self.hardware, replicas=self.launch.pipelines)
        else:
            transport = Gloo(self.launch.pipeline)
        messages: Sequence[Spec] | MessageShapes | SliceMessages = self.shapes or self.messages
        if any(of_slice != self.messages for of_slice in self._slice_messages):
            messages = SliceMessages(self._slice_messages)
        collectives: Collectives | None = None
        if self.vocabulary is not None:
            with peer_errors("the groups of all devices"):
                local = not self.launch.distributed
                collectives = LocalCollectives(len(self.program.devices)) if local else GlooCollectives()
        return Pipeline(
            self.program,
            self.stages,
            self.devices,
            transport,
            messages,
            sync=self._sync,
            shards=self._shards,
            collectives=collectives,
        )


def _digest(tensor: Tensor) -> str | None:
    """Dtype, shape and SHA-256 of every bit; None on the meta device, where there are none."""
    if tensor.is_meta:
        return None
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(values.data).hexdigest()}"


def moved(batch: Batch, hardware: torch.device) -> Batch:
    """The batch on a device; nothing is copied where it is there."""
    inputs, targets = (
        [part if part is None else map_leaves(lambda leaf: leaf.to(hardware), part) for part in parts]
        for parts in batch
    )
    return inputs, targets
