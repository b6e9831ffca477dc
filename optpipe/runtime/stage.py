"""A stage on its device: F, B, W, recomputation, offload and reload, and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from optpipe.errors import TrainingError
from optpipe.kinds import HALVES
from optpipe.mode_names import EXAMPLES, parse_recomputed, without_offload
from optpipe.runtime.activations import ActivationStore, HostSlab, storage_key
from optpipe.runtime.graph import Entry, Exit, enter, requires_gradient, with_gradient
from optpipe.runtime.loss import Loss, LossTerms, total_loss
from optpipe.runtime.messages import Gradient, Tree, leaves, map_leaves
from optpipe.runtime.module_state import Weights, own_generators, unchanged
from optpipe.runtime.parts import InParts, Part, block_parts
from optpipe.runtime.recomputation import Replay, Sample, Segment, Segments, Values, parts_of, saving_nothing
from optpipe.runtime.rng import AllGeneratorStates, GeneratorStates, OwnGenerator, RandomNumbers, never_draws
from optpipe.runtime.slices import Sequences, check_slices
from optpipe.runtime.weight_gradients import (
    Splitting,
    WeightGradients,
    compiled_part,
    defer_weight_gradients,
    gradient_dtype,
)


@dataclass
class _Graph:
    """State of a microbatch between F and B.

    `links`: begin and end of its graph, or of that of each part (`optpipe.runtime.parts`). `loss`: the graph of its
    loss, where that is apart from the module's. `segments`: the blocks that are to run again, in order.
    """

    links: list[tuple[Entry | None, Exit]]
    activations: ActivationStore | None
    loss_kind: tuple[torch.dtype, torch.device] | None
    splitting: Splitting
    loss: _LossGraph | None = None
    segments: Sequence[Segment] = ()

    @property
    def roots(self) -> list[Any]:
        """Autograd nodes at which the backward begins; None for what has no gradient."""
        exits = [end for _, end in self.links] + ([self.loss.exit] if self.loss else [])
        return [node for end in exits for node in end.nodes]


@dataclass
class _LossGraph:
    """Graph of a loss from the outputs of the module that have a gradient. Holds what the loss has saved."""

    entry: Entry
    exit: Exit


@dataclass
class _Input:
    """State of a microbatch between F and its recomputation: what F received, described by `activations` if offloaded.

    The target is the caller's. `buffers` are as F found those that it changed, `generators` as F found them, where it
    may draw. `output`: numbers of the output, which the recomputation has to find again. `loss`: the loss is not run
    again; its graph, and dtype and device of the loss.
    """

    received: Tree
    target: Tree | None
    activations: ActivationStore | None
    fused: bool
    buffers: Values
    generators: AllGeneratorStates | None
    output: Sample | None
    loss: tuple[_LossGraph, tuple[torch.dtype, torch.device]] | None


_NOTHING: AbstractContextManager[None] = nullcontext()


def first_trained(modules: Sequence[nn.Module]) -> int:
    """The first stage with a parameter to train: those before it need no backward; 0 where there is none."""
    trained = (s for s, module in enumerate(modules) if any(p.requires_grad for p in module.parameters()))
    return next(trained, 0)


class Stage:
    """A part of the model that runs on one device.

    `module` is taken over: its linear, embedding and convolution layers, and those of kinds that were registered,
    split their backward from now on when they run in this stage; elsewhere they are what they were. Where
    torch.compile has taken the module or a part of it nothing is split, and the stage runs BW alone (`splits`).

    The first stage gets the batch, which has no gradient and is not its own to move. `loss` belongs to the last
    stage. `gradient_scale` is the gradient of a microbatch's loss: 1 / microbatches, so that gradients add up to
    those of the mean over the batch. `loss_terms` keeps the terms of a loss that returns several by name.

    `autocast`, torch.bfloat16 or None: F runs under torch.autocast with that dtype; parameters and their gradients
    keep theirs. Cast weights are not kept until the backward, but cast again there.

    `seed` and the stage's number give each step and microbatch random numbers of its own (`RandomNumbers`), so that
    dropout does not depend on the schedule; None: the seed of torch at this moment. With `own_random_numbers` false,
    layers draw from torch's generators as they run. A stage of torch's own layers of which none draws spares the
    switch (`never_draws`).

    With `slices` of each microbatch, what methods call a microbatch is a unit, ``microbatch * slices + slice``, and the
    module asks for what earlier slices have left to it (`optpipe.runtime.slices`).

    Raises TrainingError where autocast is of another dtype.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        first: bool = False,
        loss: Loss | None = None,
        gradient_scale: float = 1.0,
        autocast: torch.dtype | None = None,
        seed: int | None = None,
        own_random_numbers: bool = True,
        slices: int = 1,
    ) -> None:
        _check_autocast(autocast)
        self.module = module
        self._first, self._loss, self._gradient_scale, self._autocast = first, loss, gradient_scale, autocast
        self._weight_gradients = WeightGradients()
        self._compiled = compiled_part(module)
        draws = loss is not None or not never_draws(module)
        if self.splits:
            defer_weight_gradients(module, self._weight_gradients)
        self.random = RandomNumbers(torch.initial_seed() if seed is None else seed) if own_random_numbers else None
        self._draws = draws
        self._own_generators: list[OwnGenerator] | None = None
        self.loss_terms = LossTerms()
        self._loss_differentiates: bool | None = None
        self.sequences = Sequences(slices)
        self._graphs: dict[int, _Graph] = {}
        self._inputs: dict[int, _Input] = {}
        self._replay = Replay(module)
        self._segments: dict[str, Segments] = {}
        self._heard: list[Tree] | None = None
        self._own: frozenset[int] | None = None
        self._weights = Weights(module)
        self._device = self.device
        self._anchor = torch.zeros((), requires_grad=True)
        self._enters = not first

    @property
    def device(self) -> torch.device:
        """Device of the stage's parameters."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def roots(self) -> Sequence[Any]:
        """The user's objects that it calls, for `optpipe.runtime.module_state`."""
        wrapped = getattr(self._loss, "loss", None)  # within a loss of slices or by tokens, which are ours
        return [self.module, self._loss, wrapped]

    @property
    def splits(self) -> bool:
        """True if B and W can run separately."""
        return self._compiled is None

    def join(self, number: int, kinds: Collection[str], first_trained: int = 0) -> None:
        """Become stage `number` of a program whose ops on it are of these kinds.

        Stages before `first_trained` have no backward, and that one makes no gradient of its input. Raises
        TrainingError if there are B and W among them but the module is compiled, if it is to run slices but does not
        take them, or if it has parameters to train but no backward.
        """
        if self.random:
            self.random.stage = number
        self._enters = number > first_trained
        trained = next((name for name, p in self.module.named_parameters() if p.requires_grad), None)
        if number < first_trained and trained is not None:
            raise TrainingError(
                f"stages[{number}].backward is 'none' but {trained} is to be trained. Maybe profile the model anew, or "
                "freeze it: parameter.requires_grad_(False)."
            )
        check_splits(number, self.module, kinds)
        check_slices(number, self.module, self.sequences.count)

    def begin_step(self) -> None:
        """Begin the next step's random numbers. Gradients stay: the last step may still need them."""
        self._own, self._device = None, self.device
        if self.random:
            self.random.step += 1

    def gather(self) -> None:
        """GATHER: make the parameters whole. Here they are; a stage whose wrapper shares them out does more."""

    def zero_gradients(self) -> None:
        """All gradients become zero, before the first backward of a step.

        They are allocated the first time and then stay. Frozen parameters get none.
        """
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
            elif parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))

    def forward(
        self, microbatch: int, received: Tree, target: Tree | None, offloads: bool, fused: bool = False
    ) -> Tree:
        """F. `received` is the activation of the stage before, or the batch; `target` is for the last stage.

        Returns the activation for the next stage, or the loss; neither is kept here. `offloads` says that the
        activations will leave to the host, `fused` that the backward will be BW: then small layers are left to
        autograd, which costs the host less.
        """
        activations = ActivationStore(self._resident(received, target)) if offloads else None
        saving = activations.hooks if activations else self.sequences.saving
        self._graphs[microbatch], output = self._run(microbatch, received, target, fused, saving)
        self._graphs[microbatch].activations = activations
        return output

    @cached_property
    def parts(self) -> Sequence[Part]:
        """Parts by which it runs in blocks (`optpipe.runtime.parts`); none where it gives none, or cannot run so."""
        return block_parts(self.module) if self.splits and self.sequences.count == 1 else ()

    def forward_in_parts(
        self, microbatch: int, received: Tree, target: Tree | None, fused: bool = False
    ) -> InParts[Tree]:
        """F of a microbatch that stays on the device, part by part. Returns as `forward`."""
        splitting = Splitting.LARGE if fused and not self._autocast else Splitting.ALL
        random = self.random if self._draws else None
        states: GeneratorStates | None = None
        links, loss_kind = [], None
        for k, part in enumerate(self.parts):
            drawing = states.again() if states else random.of(microbatch, self._device) if random else _NOTHING
            with torch.enable_grad(), drawing, self._autocasting():
                entry = None
                with self._weight_gradients.forward(splitting):
                    if k or self._enters:
                        received, entry = enter(self._anchor, received)
                    output = self._output_of_part(microbatch, k, received)
                if self._loss is not None and k == len(self.parts) - 1:
                    made, output = output, self._loss_of(microbatch, output, target)
                    _check_gradient(output, made)
                    loss_kind = (output.dtype, output.device)
                    del made
                states = GeneratorStates(self._device) if random else None
            links.append((entry, Exit(output)))
            received = output.detach() if isinstance(output, Tensor) else _detached(output)
            del output
            if part.exchanges:
                yield
        self._graphs[microbatch] = _Graph(links, None, loss_kind, splitting)
        return received

    def backward_in_parts(self, microbatch: int, gradient: Gradient) -> InParts[Gradient]:
        """BW of such a microbatch, part by part. Returns as `backward`."""
        graph = self._graphs.pop(microbatch)
        gradient = self._gradient_at_end(graph, gradient)
        exchanges = [part.exchanges for part in self.parts] if len(graph.links) > 1 else [False]
        while graph.links:
            entry, end = graph.links.pop()
            with self._weight_gradients.backward(graph.splitting):
                end.backward(gradient)
            gradient = entry.gradient() if entry else None
            if exchanges.pop():
                yield
        return gradient

    def forward_alone(
        self, microbatch: int, received: Tree, target: Tree | None, offloads: bool = False, fused: bool = False
    ) -> Tree:
        """F of a microbatch without a backward: as `forward`, and leaves nothing behind."""
        output = self.forward(microbatch, received, target, offloads, fused)
        del self._graphs[microbatch]
        self.sequences.evaluated(microbatch)
        return output

    def forward_of(self, mode: str | None) -> Callable[..., Tree]:
        """F of a microbatch in the mode of this name that recomputes; None: one that is kept or offloaded whole.

        Raises TrainingError for a mode that the stage does not have.
        """
        if mode is None:
            return self.forward
        recomputed = parse_recomputed(mode)
        if recomputed is None:
            raise TrainingError(f"has no mode {mode!r}. Maybe one of {EXAMPLES}.")
        if recomputed.whole:
            return self.forward_keeping_input
        name = without_offload(mode)
        if name not in self._segments:
            self._segments[name] = Segments(parts_of(self.module, recomputed), self.running_again, recomputed.group)
        return partial(self.forward_keeping_block_inputs, self._segments[name])

    def forward_keeping_input(
        self, microbatch: int, received: Tree, target: Tree | None, offloads: bool, fused: bool = False
    ) -> Tree:
        """F of a microbatch that is recomputed: as `forward`, but of its activations only the input stays.

        The first stage keeps nothing: its input is the caller's batch. With `offloads` it is the input that leaves.
        Autograd records F as it does in `forward`, without what it saves: so the layers run the very same kernels and
        draw the same random numbers here and in the recomputation. Besides the input, a copy of the buffers stays that
        F changes, such as running statistics. Raises TrainingError if F changes its input, or differentiates: then it
        cannot be run again. A loss that differentiates, as losses in chunks do, runs once, and what it saves stays.
        """
        generators, sample = self._generators(), None

        def keep_sample(output: Tree) -> None:
            nonlocal sample
            sample = self._replay.sample(output)

        with self._replay.first([*leaves(received), *leaves(target)]) as buffers:
            graph, output = self._run(
                microbatch, received, target, fused, saving_nothing, loss_apart=True, look=keep_sample
            )
        loss = (graph.loss, graph.loss_kind) if graph.loss and graph.loss_kind else None
        activations = ActivationStore(self._resident(received, target)) if offloads else None
        kept = map_leaves(activations.hold, received) if activations else received
        self._inputs[microbatch] = _Input(kept, target, activations, fused, buffers, generators, sample, loss)
        return output

    def forward_keeping_block_inputs(
        self,
        segments: Segments,
        microbatch: int,
        received: Tree,
        target: Tree | None,
        offloads: bool,
        fused: bool = False,
    ) -> Tree:
        """F of a microbatch some of whose blocks, those of `segments`, are recomputed: of these the inputs alone stay.

        All else as `forward`. Raises TrainingError if a block changes its input, or differentiates: then it cannot be
        run again.
        """
        activations = ActivationStore(self._resident(received, target)) if offloads else None
        saving = activations.hooks if activations else self.sequences.saving
        with segments.recording(activations, self._device, self._generators) as calls:
            graph, output = self._run(microbatch, received, target, fused, saving)
        graph.activations, graph.segments = activations, calls
        self._graphs[microbatch] = graph
        return output

    def has_mode(self, mode: str) -> bool:
        """True if the stage has this mode that recomputes: as many blocks, and the parts in them."""
        try:
            self.forward_of(mode)
        except TrainingError:
            return False
        return True

    def recompute(self, microbatch: int) -> None:
        """C: run F again on the same input, random numbers and buffers, and keep the activations for the backward.

        Where the mode has blocks run again, these run alone. Buffers stay as they are: running statistics do not count
        a microbatch twice.
        """
        if microbatch in self._graphs:
            graph = self._graphs[microbatch]
            if graph.activations:
                graph.activations.hand_over()
            with (
                self._weight_gradients.forward(graph.splitting),
                self.sequences.again(microbatch),
                self.running_again([segment.block for segment in graph.segments]),
            ):
                for segment in graph.segments:
                    segment.recompute()
            return
        kept = self._inputs.pop(microbatch)
        received = kept.received
        if kept.activations:
            received = map_leaves(kept.activations.held, received)
            kept.activations.hand_over()
        with self._replay.second(kept.buffers), kept.generators.again() if kept.generators else _NOTHING:
            self._graphs[microbatch], _ = self._run(
                microbatch,
                received,
                kept.target,
                kept.fused,
                self.sequences.saving,
                loss=kept.loss,
                look=partial(self._replay.compare, kept.output),
                again=True,
            )

    def _generators(self) -> AllGeneratorStates | None:
        """States of the generators from which F may draw; None where it does not."""
        if not self._draws:
            return None
        if self._own_generators is None:
            self._own_generators = own_generators(self.roots)
        return AllGeneratorStates(self._device, self._own_generators)

    def running_again(self, _blocks: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Context in which blocks run again. A stage whose wrapper shares parameters out makes those whole.

        It is entered for all blocks that run again one after the other, and for each of them within.
        """
        return _NOTHING

    def _run(
        self,
        microbatch: int,
        received: Tree,
        target: Tree | None,
        fused: bool,
        saving: Callable[[], AbstractContextManager[Any]],
        *,
        loss_apart: bool = False,
        loss: tuple[_LossGraph, tuple[torch.dtype, torch.device]] | None = None,
        look: Callable[[Tree], None] | None = None,
        again: bool = False,
    ) -> tuple[_Graph, Tree]:
        """Run the module, and the loss on the last stage, with autograd saving tensors in contexts of `saving`.

        With `loss_apart` a loss that differentiates has a graph of its own, which saves all; `loss` is such a graph of
        an earlier run: then the loss is not run. `look` is called with the module's output. `again`: the unit has run
        before. Returns the graph, which alone keeps what was saved, and the output without it.
        """
        # Under autocast autograd would keep a cast copy of every weight until the backward.
        splitting = Splitting.LARGE if fused and not self._autocast else Splitting.ALL
        random, sequences = self.random if self._draws else None, self.sequences
        with (
            torch.enable_grad(),
            random.of(microbatch, self._device) if random else _NOTHING,
            self._autocasting(),
            sequences.again(microbatch) if again else sequences.first(microbatch, received, random, self._device),
        ):
            entry = None
            loss_graph, loss_kind = loss or (None, None)
            with saving(), self._weight_gradients.forward(splitting):
                if self._enters:
                    received, entry = enter(self._anchor, received)
                output = self._output(microbatch, received)
            if look is not None:
                look(output)
            # A loss may run layers of the stage and their backward at once, as losses in chunks do: those do not wait.
            if loss is not None:
                output = with_gradient(output)
            elif self._loss is not None:
                if loss_apart and self._loss_differentiates is not False:
                    output, loss_graph = self._loss_apart(microbatch, output, target)
                else:
                    with saving():
                        loss_of_output = self._loss_of(microbatch, output, target)
                    _check_gradient(loss_of_output, output)
                    output = loss_of_output
                loss_kind = (output.dtype, output.device)
        graph = _Graph([(entry, Exit(output))], None, loss_kind, splitting, loss_graph)
        return graph, output.detach() if isinstance(output, Tensor) else _detached(output)

    def _loss_apart(self, microbatch: int, output: Tree, target: Tree | None) -> tuple[Tensor, _LossGraph | None]:
        """The loss of a microbatch whose module will run again, and its graph if it must not run again itself.

        A loss that differentiates adds to gradients of layers that it runs, once for each run. The first run tells: an
        ordinary loss does not ask for what autograd saves in it.
        """
        parts = [part.detach() for part in with_gradient(output)]
        entered, entry = enter(self._anchor, parts)
        new = iter(entered)
        output = map_leaves(lambda part: next(new) if requires_gradient(part) else part, output)
        if self._loss_differentiates:
            loss = self._loss_of(microbatch, output, target)
        else:
            asked = False

            def unpack(saved: Tensor) -> Tensor:
                nonlocal asked
                asked = True
                return saved

            with saved_tensors_hooks(Tensor.detach, unpack):
                loss = self._loss_of(microbatch, output, target)
            self._loss_differentiates = asked
        return loss, _LossGraph(entry, Exit(loss)) if self._loss_differentiates else None

    def trial(self, microbatch: int, received: Tree, target: Tree | None) -> Tree:
        """F as it is in training, without a backward: returns as `forward`, and leaves nothing behind.

        It is run to see what `forward` will return. Autograd records it, since a module may return something else
        without, or work with the graph, but keeps nothing, unless the module differentiates within it.
        """
        with self.sequences.first(microbatch, received):
            with suppress(Exception), self._weights.unchanged(), unchanged(self.roots, self._device):
                return self._tried(microbatch, received, target, saving_nothing())
            with self._weights.unchanged(), unchanged(self.roots, self._device):
                return self._tried(microbatch, received, target, _NOTHING)

    def _tried(self, microbatch: int, received: Tree, target: Tree | None, saving: AbstractContextManager[Any]) -> Tree:
        with (
            torch.enable_grad(),
            self.random.of(microbatch, self._device) if self.random else _NOTHING,
            self._autocasting(),
            saving,
            self._weight_gradients.forward(Splitting.NONE),
        ):
            if self._enters:
                received, _ = enter(self._anchor, received)
            output = self._output(microbatch, received)
            if self._loss is not None:
                output = total_loss(self._loss(output, target))
        return map_leaves(_detached_tensor, output)

    def evaluate(self, microbatch: int, received: Tree, target: Tree | None) -> Tree:
        """F for evaluation: returns as `forward`, and leaves nothing behind. Where one listens, a `trial`."""
        if self._heard is not None:
            self._heard.append(received)
            result = self.trial(microbatch, received, target)
            self.sequences.evaluated(microbatch)
            return result
        with torch.no_grad(), self._autocasting(), self.sequences.first(microbatch, received):
            output = self._output(microbatch, received)
            result = output if self._loss is None else total_loss(self._loss(output, target))
        self.sequences.evaluated(microbatch)
        return result

    @contextmanager
    def listening(self) -> Iterator[list[Tree]]:
        """Context that records the input of each `evaluate` call, which is a `trial`, in the list that it yields."""
        heard: list[Tree] = []
        self._heard = heard
        try:
            yield heard
        finally:
            self._heard = None

    def copy_out(self, microbatch: int, slab: HostSlab, precision: str | None = None) -> None:
        """O: copy the activations of a microbatch to the host, if asked for in low precision (`LOW_PRECISIONS`)."""
        self._activations(microbatch).copy_out(slab, precision)

    def free(self, microbatch: int) -> None:
        """RELEASE: free them on the device, after the copy."""
        self._activations(microbatch).free()

    def allocate(self, microbatch: int) -> None:
        """PREPARE: allocate device memory for their return."""
        self._activations(microbatch).allocate()

    def copy_in(self, microbatch: int) -> None:
        """R: copy them back."""
        self._activations(microbatch).copy_in()

    def backward_input(self, microbatch: int, gradient: Gradient) -> Gradient:
        """B. `gradient` is that of the output, None on the last stage; returns that of the input, None on the first.

        The gradient of a tree has its form, with None for integers and booleans. The weight gradients are left to
        `backward_weight`.
        """
        if self._compiled is not None:
            raise TrainingError(_cannot_split(self._compiled))
        graph = self._graphs.pop(microbatch)
        with self._weight_gradients.backward_input(microbatch, graph.splitting):
            return self._backward(microbatch, graph, gradient)

    def backward_weight(self, microbatch: int) -> None:
        """W: add the weight gradients that B deferred to `.grad`."""
        self._weight_gradients.compute(microbatch)

    def backward(self, microbatch: int, gradient: Gradient) -> Gradient:
        """BW: `backward_input` with the weight gradients added at once."""
        graph = self._graphs.pop(microbatch)
        with self._weight_gradients.backward(graph.splitting):
            return self._backward(microbatch, graph, gradient)

    def recompute_and_backward_input(self, microbatch: int, gradient: Gradient) -> Gradient:
        """CB: `recompute`, then B; where blocks run again, each of them when B comes to it."""
        if microbatch in self._inputs:
            self.recompute(microbatch)
        return self.backward_input(microbatch, gradient)

    def recompute_and_backward(self, microbatch: int, gradient: Gradient) -> Gradient:
        """CBW: `recompute`, then BW; where blocks run again, each of them when BW comes to it."""
        if microbatch in self._inputs:
            self.recompute(microbatch)
        return self.backward(microbatch, gradient)

    def clear(self) -> None:
        """Drop the state of all microbatches, host memory included, after an error."""
        held = [state.activations for state in self._graphs.values()]
        for activations in held + [state.activations for state in self._inputs.values()]:
            if activations:
                activations.hand_over()
        self._graphs.clear()
        self._inputs.clear()
        self._weight_gradients.clear()
        self.sequences.clear()

    def _output(self, _microbatch: int, received: Tree) -> Tree:
        """The output of the module; a subclass may call its module with other arguments."""
        output: Tree = self.module(received)
        return output

    def _output_of_part(self, _microbatch: int, number: int, received: Tree) -> Tree:
        """The output of a part of the module."""
        return self.parts[number].run(received)

    def _loss_of(self, microbatch: int, output: Tree, target: Tree | None) -> Tensor:
        """The loss of the last stage; a subclass may call its loss with other arguments."""
        assert self._loss is not None, "only the last stage has a loss"
        assert target is not None, "the last stage has a target"
        return self.loss_terms.total(microbatch, self._loss(output, target))

    def _backward(self, microbatch: int, graph: _Graph, gradient: Gradient) -> Gradient:
        if graph.activations:
            graph.activations.hand_over()
        gradient = self._gradient_at_end(graph, gradient)
        if graph.loss is not None:
            graph.loss.exit.backward(gradient)
            gradient = graph.loss.entry.gradient()
        with self.sequences.again(microbatch):
            while graph.links:  # a graph that is done must not keep its gradient
                entry, end = graph.links.pop()
                end.backward(gradient)
                gradient = entry.gradient() if entry else None
        self.sequences.release(microbatch)
        return gradient

    def _gradient_at_end(self, graph: _Graph, gradient: Gradient) -> Gradient:
        """The gradient of the output, on the last stage that of the loss."""
        if graph.loss_kind is None:
            return gradient
        dtype, device = graph.loss_kind
        return torch.full((), self._gradient_scale, dtype=dtype, device=device)

    def _autocasting(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, self._autocast) if self._autocast else _NOTHING

    def _activations(self, microbatch: int) -> ActivationStore:
        state = self._graphs[microbatch] if microbatch in self._graphs else self._inputs[microbatch]
        activations = state.activations
        assert activations is not None, "only microbatches run with offloads=True leave"
        return activations

    def _resident(self, received: Tree, target: Tree | None) -> Collection[int]:
        """Storages that must not be offloaded: weights, and the caller's batch."""
        batch = [*leaves(received)] if self._first else []
        if target is not None:
            batch += leaves(target)
        if self._own is None:
            self._own = storages([*self.module.parameters(), *self.module.buffers()])
        return self._own | storages(batch) if batch else self._own


def _check_gradient(loss: Tensor, output: Tree) -> None:
    """Raise TrainingError for a loss without a gradient of an output that has one: nothing would be trained."""
    if not loss.requires_grad and with_gradient(output):
        raise TrainingError(
            "the loss has no gradient, though the output of the last stage has one. Maybe the loss is detached, made "
            "anew from its value (torch.tensor(...)), or computed under torch.no_grad()."
        )


def check_splits(number: int, module: nn.Module, kinds: Collection[str]) -> None:
    """Raise TrainingError if a stage's ops of these kinds cannot run: B and W are one where its module is compiled."""
    compiled = compiled_part(module)
    if compiled is not None and not {*HALVES}.isdisjoint(kinds):
        raise TrainingError(f"stages[{number}]: {_cannot_split(compiled)}")


def _cannot_split(compiled: str) -> str:
    part = f"module.{compiled}" if compiled else "module"
    return (
        f"{part} is compiled by torch.compile, which computes input and weight gradients at once, but the "
        "program has B and W apart. Maybe solve with fused backwards (BW), or compile less of the module."
    )


def _detached_tensor(part: Any) -> Any:
    """A tensor without its graph; anything else as it is."""
    return part.detach() if isinstance(part, Tensor) else part


def _detached(output: Tree) -> Tree:
    detached: Tree = map_leaves(Tensor.detach, output)
    return detached


def _check_autocast(dtype: torch.dtype | None) -> None:
    if dtype is torch.float16:
        raise TrainingError(
            "autocast is torch.float16, whose gradients need loss scaling, which stages do not do. "
            "Maybe torch.bfloat16, whose range is that of float32."
        )
    if dtype not in (None, torch.bfloat16):
        raise TrainingError(f"autocast is {dtype} but must be torch.bfloat16 or None.")


def storages(values: Iterable[Any]) -> frozenset[int]:
    """Storages (`storage_key`) of the tensors among the values."""
    return frozenset(storage_key(value) for value in values if isinstance(value, Tensor))


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context with all layers in evaluation mode; restores the mode of each."""
    layers = [layer for module in modules for layer in module.modules()]
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode
