"""One stage of the model: its F, B, W, O and R for each microbatch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from optpipe.runtime.activations import ActivationStore
from optpipe.runtime.host_pool import HostPool
from optpipe.runtime.weight_gradients import WeightGradients, defer_weight_gradients

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of one microbatch from the model's output and the target."""


@dataclass
class _Graph:
    """What a microbatch leaves between F and B: the root of its graph and where its input gradient will be put."""

    root: GradientEdge
    input_gradient: list[Tensor]
    activations: ActivationStore | None


class Stage:
    """A part of the model that runs on one device.

    `module` is taken over: its layers are replaced by ones that can split their backward, with the same parameters.
    The first stage gets the batch, which has no gradient and is not its own to move. `loss` belongs to the last
    stage. `gradient_scale` is the gradient of a microbatch's loss: 1 / microbatches, so that gradients add up to
    those of the mean over the batch.
    """

    def __init__(
        self, module: nn.Module, *, first: bool = False, loss: Loss | None = None, gradient_scale: float = 1.0
    ) -> None:
        self._weight_gradients = WeightGradients()
        self.module = defer_weight_gradients(module, self._weight_gradients)
        self._first, self._loss = first, loss
        self._gradient_scale = gradient_scale
        self._graphs: dict[int, _Graph] = {}
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def device(self) -> torch.device:
        """Where the stage's parameters are."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    def zero_gradients(self) -> None:
        """Set all gradients to zero; they are allocated the first time and then stay."""
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def forward(self, microbatch: int, received: Tensor, target: Tensor | None, offloads: bool) -> Tensor:
        """F. `received` is the activation of the stage before, or the batch; `target` is for the last stage.

        Returns the activation for the next stage, or the loss; neither is kept here. `offloads` says that the
        activations will leave to the host.
        """
        activations = ActivationStore(self._resident(received, target)) if offloads else None
        input_gradient: list[Tensor] = []
        with torch.enable_grad(), activations.hooks() if activations else nullcontext():
            x = received if self._first else _enter(self._anchor, received, input_gradient)
            output = self.module(x)
            if self._loss is not None:
                assert target is not None, "the last stage has a target"
                output = self._loss(output, target)
        self._graphs[microbatch] = _Graph(get_gradient_edge(output), input_gradient, activations)
        detached: Tensor = output.detach()
        return detached

    def offload(self, microbatch: int, pool: HostPool) -> None:
        """O: the activations of a microbatch move to the host."""
        self._activations(microbatch).offload(pool)

    def reload(self, microbatch: int) -> None:
        """R: they come back."""
        self._activations(microbatch).reload(self.device)

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """B. `gradient` is that of the output, None on the last stage; returns that of the input, None on the first.

        The weight gradients are left to `backward_weight`.
        """
        with self._weight_gradients.kept_for(microbatch):
            return self.backward(microbatch, gradient)

    def backward_weight(self, microbatch: int) -> None:
        """W: adds the weight gradients that B left to `.grad`."""
        self._weight_gradients.compute(microbatch)

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """BW: `backward_input` with the weight gradients added at once."""
        graph = self._graphs.pop(microbatch)
        if graph.activations:
            graph.activations.release()
        if gradient is None:
            gradient = torch.full((), self._gradient_scale, dtype=self._dtype, device=self.device)
        torch.autograd.backward((graph.root,), (gradient,))
        return graph.input_gradient.pop() if graph.input_gradient else None

    def clear(self) -> None:
        """Drop all that microbatches have left, host buffers included: after an error."""
        for graph in self._graphs.values():
            if graph.activations:
                graph.activations.release()
        self._graphs.clear()
        self._weight_gradients.clear()

    @property
    def _dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.module.parameters()), torch.get_default_dtype())

    def _activations(self, microbatch: int) -> ActivationStore:
        activations = self._graphs[microbatch].activations
        assert activations is not None, "only microbatches run with offloads=True leave"
        return activations

    def _resident(self, received: Tensor, target: Tensor | None) -> set[int]:
        """Storages that are not this stage's to move: weights, and the caller's batch."""
        own = [*self.module.parameters(), *self.module.buffers()]
        batch = [received if self._first else None, target]
        return {t.untyped_storage().data_ptr() for t in (*own, *batch) if t is not None}


def _enter(anchor: Tensor, received: Tensor, gradient: list[Tensor]) -> Tensor:
    entered: Tensor = _Entry.apply(anchor, received, gradient)  # type: ignore[no-untyped-call]
    return entered


class _Entry(torch.autograd.Function):
    """The identity at a stage's entry, whose backward puts the input gradient into a list.

    `received` would have to be kept as a leaf to read its `.grad`; here nothing keeps it but what the layers save, so
    that it too can leave to the host. `_anchor` only makes autograd record the node.
    """

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, received: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.gradient.append(grad)
        return None, None, None
