"""The submodule of a `PipelineStage` as a stage of OptPipe's runtime, and the microbatches that it works on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from optpipe.runtime import Stage
from optpipe.runtime.messages import Tree, leaves
from optpipe.runtime.stage import storages

LossFunction = Callable[..., Tensor]
"""Called with the output of the last stage, the target, and the `loss_kwargs` of the step; returns a scalar."""


@dataclass
class Microbatches:
    """What a step or an evaluation works on, and what it leaves: one entry for each microbatch.

    `targets` is None where no loss is wanted. `outputs` are kept if `keeps_outputs`; they and the losses hold no graph.
    """

    args: Sequence[tuple[Any, ...]] = ()
    kwargs: Sequence[Mapping[str, Any]] = ()
    targets: Sequence[Any] | None = None
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keeps_outputs: bool = False
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def resident(self) -> Collection[int]:
        """The storages of keyword arguments and targets, which are the caller's and never leave to the host."""
        return storages(leaves([*map(dict, self.kwargs), *(self.targets or ())]))


class SubmoduleStage(Stage):
    """Calls a `PipelineStage`'s submodule as torch's schedules do: with the args of the microbatch on the first stage,
    else with what the stage before returned, and with the keyword arguments of the microbatch on every stage.

    `batch` is the one that the `PlannedSchedule` sets before each step.
    """

    batch: Microbatches

    def __init__(self, stage: PipelineStage, loss_fn: LossFunction | None) -> None:
        self._is_last: bool = stage.is_last
        self._loss_fn = loss_fn
        self._nothing = torch.zeros(())
        super().__init__(
            stage.submod,
            first=stage.is_first,
            loss=loss_fn if stage.is_last else None,
            own_random_numbers=False,
        )

    def forward(
        self, microbatch: int, received: Tree, target: Tree | None, offloads: bool, fused: bool = False
    ) -> Tree:
        """F, as every stage does it; the last one leaves its loss in the batch."""
        output = super().forward(microbatch, received, target, offloads, fused)
        return self._nothing if self._is_last else output

    def evaluate(self, microbatch: int, received: Tree, target: Tree | None) -> Tree:
        """F without a backward; the last stage leaves output and loss in the batch."""
        with torch.no_grad():
            output = self._output(microbatch, received)
            if self._is_last and self._loss_fn is not None and self.batch.targets is not None:
                self._loss_of(microbatch, output, target)
        return self._nothing if self._is_last else output

    def _output(self, microbatch: int, received: Tree) -> Tree:
        args = tuple(received) if isinstance(received, tuple | list) else (received,)
        output = self.module(*args, **self.batch.kwargs[microbatch])
        if self._is_last and self.batch.keeps_outputs:
            self.batch.outputs[microbatch] = _detached(output)
        return tuple(output) if isinstance(output, list) and not self._is_last else output

    def _loss_of(self, microbatch: int, output: Tree, _target: Tree | None) -> Tensor:
        assert self._loss_fn is not None, "a loss is asked for where there is one"
        assert self.batch.targets is not None, "a loss is asked for where there are targets"
        loss = self._loss_fn(output, self.batch.targets[microbatch], **self.batch.loss_kwargs)
        self.batch.losses[microbatch] = loss.detach()
        return loss

    def _resident(self, received: Tree, _target: Tree | None) -> Collection[int]:
        return frozenset(super()._resident(received, None)) | frozenset(self.batch.resident())


def _detached(output: Any) -> Any:
    """The output without its graph; what is no tensor stays."""
    return torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, output)
