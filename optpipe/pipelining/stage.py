"""The submodule of a `PipelineStage` as a stage of OptPipe's runtime, and the microbatches that it works on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from optpipe.pipelining import fsdp
from optpipe.pipelining.gradients import GradientShares
from optpipe.pipelining.layouts import Layouts, from_local, to_local
from optpipe.runtime import Stage
from optpipe.runtime.loss import Losses, total_loss
from optpipe.runtime.messages import Gradient, Tree, leaves, map_leaves
from optpipe.runtime.parts import InParts, Part
from optpipe.runtime.stage import storages
from optpipe.runtime.weight_gradients import is_distributed

LossFunction = Callable[..., Losses]
"""Called with the output of the last stage, the target, and the `loss_kwargs` of the step; returns a scalar.

Of several terms, a dict, the sum is trained and reported.
"""


@dataclass
class Microbatches:
    """Inputs and results of a step or an evaluation: one entry per microbatch.

    `targets` is None where no loss is wanted. `outputs` are kept if `keeps_outputs`; they and the losses hold no graph.
    """

    args: Sequence[tuple[Any, ...]] = ()
    kwargs: Sequence[Mapping[str, Any]] = ()
    targets: Sequence[Any] | None = None
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keeps_outputs: bool = False
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def resident(self) -> frozenset[int]:
        """The storages of keyword arguments and targets, which are the caller's and never leave to the host."""
        return storages(leaves([*map(dict, self.kwargs), *(self.targets or ())]))


class SubmoduleStage(Stage):
    """Calls a `PipelineStage`'s submodule as torch's schedules do: with the args of the microbatch on the first stage,
    else with what the stage before returned, and with the keyword arguments of the microbatch on every stage.

    `batch` is the one that the `PlannedSchedule` sets before each step. `sends` and `receives` are the layouts of the
    DTensors among its messages.
    """

    batch: Microbatches

    def __init__(self, stage: PipelineStage, loss_fn: LossFunction | None) -> None:
        self._stage = stage
        self._number: int = stage.stage_index
        self._is_last: bool = stage.is_last
        self._loss_fn = loss_fn
        self._nothing = torch.zeros(())
        self._shares: GradientShares | None = None
        self._again = False
        self._gathered: dict[str, nn.Parameter] = {}
        self._kept: frozenset[int] | None = None
        self.sends: Layouts = []
        self.receives: Layouts = []
        super().__init__(
            stage.submod,
            first=stage.is_first,
            loss=loss_fn if stage.is_last else None,
            own_random_numbers=False,
        )

    def gather_once(self) -> None:
        """Let FSDP make the parameters that it gathers: no offload may move them. A collective of its processes."""
        self._gathered = fsdp.gathered_parameters(self.module)

    def begin_step(self) -> None:
        """Begin a step; until REDUCE, wrappers only add gradients up."""
        super().begin_step()
        self._kept = None
        fsdp.begin_step(self.module)
        self._gather_ahead = fsdp.GatherAhead(self.module)

    def gather(self) -> None:
        """GATHER: a collective of the processes that share out the stage's parameters."""
        fsdp.gather(self.module)

    @property
    def gathered(self) -> Mapping[str, nn.Parameter]:
        """The parameters that FSDP gathers, by name."""
        return self._gathered

    def watch_gradients(self) -> None:
        """Have `check_gradients` tell at the end of the step that now begins where a share of a gradient is missing."""
        parameters = dict(self.module.named_parameters()) | self._gathered
        self._shares = shares = GradientShares({id(parameter): name for name, parameter in parameters.items()})
        self._weight_gradients.observer = lambda task: shares.add(task.parameters)

    def check_gradients(self) -> None:
        """At the end of a step that was watched. Raises TrainingError."""
        if self._shares is not None:
            shares = self._shares
            self.forget_gradients()
            shares.check(self._number)

    def forget_gradients(self) -> None:
        """Watch no longer."""
        if self._shares is not None:
            self._shares.end()
        self._shares = self._weight_gradients.observer = None

    def _run(
        self, microbatch: int, *given: Any, loss_apart: bool = False, again: bool = False, **more: Any
    ) -> tuple[Any, Tree]:
        """F, or F again in C; the last stage leaves its output and loss in the batch, once."""
        self._gather_ahead.begin_forward()
        self._again = again
        try:
            graph, output = super()._run(microbatch, *given, loss_apart=loss_apart, again=again, **more)
        finally:
            self._again = False
        if self._shares is not None and not loss_apart:  # a graph without its loss is not kept for a backward
            self._shares.expect(microbatch, graph.roots)
        return graph, self._nothing if self._is_last else output

    @cached_property
    def parts(self) -> Sequence[Part]:
        """Parts of the submodule; none within a wrapper that shares out parameters, or reduces in the backward."""
        wrapped = isinstance(self.module, DistributedDataParallel) or fsdp.is_wrapped(self.module)
        return () if wrapped else super().parts

    def forward_in_parts(
        self, microbatch: int, received: Tree, target: Tree | None, fused: bool = False
    ) -> InParts[Tree]:
        """F part by part; at once where the microbatch has keyword arguments, which parts do not take."""
        if self.batch.kwargs[microbatch]:
            return self.forward(microbatch, received, target, offloads=False, fused=fused)
        output = yield from super().forward_in_parts(microbatch, received, target, fused)
        if self._shares is not None:
            self._shares.expect(microbatch, self._graphs[microbatch].roots)
        return self._nothing if self._is_last else output

    @contextmanager
    def running_again(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Context in which blocks run again, whose parameters may be in shards."""
        with fsdp.gathered(self.module, blocks), self._gather_ahead.aside():
            yield

    def evaluate(self, microbatch: int, received: Tree, target: Tree | None) -> Tree:
        """F without a backward; the last stage leaves output and loss in the batch."""
        with torch.no_grad():
            output = self._output(microbatch, received)
            if self._is_last and self._loss_fn is not None and self.batch.targets is not None:
                self._loss_of(microbatch, output, target)
        return self._nothing if self._is_last else output

    def backward_input(self, microbatch: int, gradient: Gradient) -> Gradient:
        """B."""
        self._begin_backward(microbatch)
        return super().backward_input(microbatch, gradient)

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        if self._shares is not None:
            self._shares.microbatch = microbatch
        super().backward_weight(microbatch)

    def backward(self, microbatch: int, gradient: Gradient) -> Gradient:
        """BW."""
        self._begin_backward(microbatch)
        return super().backward(microbatch, gradient)

    def backward_in_parts(self, microbatch: int, gradient: Gradient) -> InParts[Gradient]:
        """BW part by part."""
        self._begin_backward(microbatch)
        return (yield from super().backward_in_parts(microbatch, gradient))

    def _begin_backward(self, microbatch: int) -> None:
        self._gather_ahead.begin_backward()
        if self._shares is not None:
            self._shares.microbatch = microbatch

    def _output(self, microbatch: int, received: Tree) -> Tree:
        args = self._arguments(received)
        # DistributedDataParallel would reduce in the backward; GradientCompletion does at the end of the step.
        with self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext():
            output = self.module(*args, **self.batch.kwargs[microbatch])
        return self._returned(microbatch, output)

    def _output_of_part(self, microbatch: int, number: int, received: Tree) -> Tree:
        run = self.parts[number].run
        output = run(received) if number else run(*self._arguments(received))
        return self._returned(microbatch, output) if number == len(self.parts) - 1 else output

    def _arguments(self, received: Tree) -> tuple[Any, ...]:
        """Positional arguments of the submodule."""
        if any(self.receives):
            received = from_local(received, self.receives, self._stage)
        return tuple(received) if isinstance(received, tuple | list) else (received,)

    def _returned(self, microbatch: int, output: Any) -> Tree:
        """Output of the submodule, as the next stage gets it."""
        if self._is_last:
            if self.batch.keeps_outputs and not self._again:
                self.batch.outputs[microbatch] = _detached(output)
            return output
        output, self.sends = to_local(output, self._number)
        return tuple(output) if isinstance(output, list) else output

    def _loss_of(self, microbatch: int, output: Tree, _target: Tree | None) -> Tensor:
        assert self._loss_fn is not None, "a loss is asked for where there is one"
        assert self.batch.targets is not None, "a loss is asked for where there are targets"
        loss = total_loss(self._loss_fn(output, self.batch.targets[microbatch], **self.batch.loss_kwargs))
        if is_distributed(loss):
            loss = loss.full_tensor()  # type: ignore[attr-defined]
        if not self._again:
            # A copy: the storage of the scalar that mse_loss returns is as large as the output.
            self.batch.losses[microbatch] = loss.detach().clone()
        return loss

    def _resident(self, received: Tree, _target: Tree | None) -> Collection[int]:
        if self._kept is None:
            self._kept = self.batch.resident() | storages(self._gathered.values())
        return frozenset(super()._resident(received, None)) | self._kept


def _detached(output: Any) -> Any:
    """The output without its graph; what is no tensor stays."""
    return map_leaves(lambda part: part.detach() if isinstance(part, Tensor) else part, output)
