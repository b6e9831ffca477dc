"""Ends of a stage's autograd graph: the message that enters it, and the output that leaves it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from optpipe.runtime.messages import Gradient, Tree, leaves, map_leaves, no_tensor, rebuild
from optpipe.runtime.torch_private import run_backward


class Entry:
    """Holder of the gradient of the message that a stage received. Keeps no tensor until the backward."""

    def __init__(self, received: Tree, floating: list[Tensor]) -> None:
        self.caught: list[Tensor] = []
        self._form = None if isinstance(received, Tensor) else map_leaves(_has_gradient, received)
        self._kinds = [(part.shape, part.dtype, part.device) for part in floating]

    def gradient(self) -> Gradient:
        """Gradient of the message, after the backward; zeros for tensors on which nothing depends."""
        found = self.caught or [torch.zeros(shape, dtype=dtype, device=at) for shape, dtype, at in self._kinds]
        self.caught = []
        if self._form is None:
            return found[0] if found else None
        new = iter(found)
        gradient: Gradient = rebuild(self._form, [next(new) if floating else None for floating in leaves(self._form)])
        return gradient


def enter(anchor: Tensor, received: Tree) -> tuple[Tree, Entry]:
    """Make the message the input of the stage's graph; return it with the holder of its gradient.

    A leaf of autograd would be kept by its graph. Here only the tensors that layers save keep the message, so that it
    can be offloaded too. `anchor` is any tensor that requires a gradient; it makes autograd record the node.
    """
    if isinstance(received, Tensor) and _has_gradient(received):
        entry = Entry(received, [received])
        (entered,) = _Entry.apply(anchor, entry.caught, received)  # type: ignore[no-untyped-call]
        return entered, entry
    floating = [part for part in leaves(received) if _has_gradient(part)]
    entry = Entry(received, floating)
    if not floating:
        return received, entry
    new = iter(_Entry.apply(anchor, entry.caught, *floating))  # type: ignore[no-untyped-call]
    message: Tree = map_leaves(lambda part: next(new) if _has_gradient(part) else part, received)
    return message, entry


class Exit:
    """Roots of a stage's graph: one per output tensor with a gradient. Keeps no tensor.

    Raises TrainingError if the output holds anything but tensors.
    """

    def __init__(self, output: Tree) -> None:
        self._edges = [_edge(output)] if isinstance(output, Tensor) else [_edge(part) for part in leaves(output)]

    @property
    def nodes(self) -> list[Any]:
        """Autograd nodes of the output tensors, None for tensors without a gradient."""
        return [edge and edge.node for edge in self._edges]

    def backward(self, gradient: Gradient) -> None:
        """Run the graph, which this frees, from the gradient of the output."""
        pairs = zip(self._edges, leaves(gradient), strict=True)
        wanted = [(edge, part) for edge, part in pairs if edge is not None and part is not None]
        if wanted:
            edges, parts = zip(*wanted, strict=True)
            run_backward(edges, parts, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _edge(part: Any) -> GradientEdge | None:
    if not isinstance(part, Tensor):
        raise no_tensor(part)
    if not part.requires_grad:
        return None
    node: Any = part.grad_fn
    if node is None or isinstance(node, BackwardCFunction):
        return get_gradient_edge(part)  # keeps the Python object of such a node alive
    return GradientEdge(node, part.output_nr)


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def requires_gradient(part: Any) -> bool:
    """True for a tensor that has a gradient."""
    return isinstance(part, Tensor) and part.requires_grad


def with_gradient(output: Tree) -> list[Tensor]:
    """The tensors of an output that have a gradient."""
    return [part for part in leaves(output) if requires_gradient(part)]


class _Entry(torch.autograd.Function):
    """Identity whose backward collects the gradients in a list.

    Outputs are detached, not views: autograd forbids in-place changes of a view made in a custom function.
    """

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, caught: list[Tensor], *received: Tensor) -> tuple[Tensor, ...]:
        ctx.caught = caught
        return tuple([part.detach() for part in received])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.caught.extend(gradients)
        return (None,) * (2 + len(gradients))
