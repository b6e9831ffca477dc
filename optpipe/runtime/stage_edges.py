"""Where autograd begins and ends in a stage: at what it receives from the stage before, and at what it hands on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from optpipe.runtime.messages import Gradient, Tree, leaves, map_leaves, no_tensor, rebuild


class Entry:
    """Catches the gradient of the message that a stage received. Keeps no tensor until then."""

    def __init__(self, received: Tree, floating: list[Tensor]) -> None:
        self.caught: list[Tensor] = []
        self._form = None if isinstance(received, Tensor) else map_leaves(_has_gradient, received)
        self._kinds = [(part.shape, part.dtype, part.device) for part in floating]

    def gradient(self) -> Gradient:
        """That of the message, after the backward; zeros for what nothing depends on."""
        found = self.caught or [torch.zeros(shape, dtype=dtype, device=at) for shape, dtype, at in self._kinds]
        self.caught = []
        if self._form is None:
            return found[0] if found else None
        new = iter(found)
        gradient: Gradient = rebuild(self._form, [next(new) if floating else None for floating in leaves(self._form)])
        return gradient


def enter(anchor: Tensor, received: Tree) -> tuple[Tree, Entry]:
    """The message as the beginning of the stage's graph, and what catches its gradient.

    A leaf of autograd would be kept by its graph. Here nothing keeps the message but what the layers save, so that
    it too can leave to the host. `anchor` is any tensor that requires a gradient; it makes autograd record the node.
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
    """The roots of a stage's graph: one for each tensor of its output that has a gradient. Keeps no tensor.

    Raises TrainingError where the output holds anything but tensors.
    """

    def __init__(self, output: Tree) -> None:
        self._edges = [_edge(output)] if isinstance(output, Tensor) else [_edge(part) for part in leaves(output)]

    @property
    def nodes(self) -> list[Any]:
        """The nodes of autograd that the graph begins with, None for tensors without a gradient."""
        return [edge and edge.node for edge in self._edges]

    def backward(self, gradient: Gradient) -> None:
        """Run the graph, which this frees, from the gradient of the output."""
        pairs = zip(self._edges, leaves(gradient), strict=True)
        wanted = [(edge, part) for edge, part in pairs if edge is not None and part is not None]
        if wanted:
            edges, parts = zip(*wanted, strict=True)
            # The end of torch.autograd.backward, without its checks of shapes, which the engine makes again: they take
            # half of the time of an empty backward.
            _engine_run_backward(edges, parts, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _edge(part: Any) -> GradientEdge | None:
    if not isinstance(part, Tensor):
        raise no_tensor(part)
    if not part.requires_grad:
        return None
    node: Any = part.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(part)  # which keeps alive what such a node does not
    return GradientEdge(node, part.output_nr)


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Entry(torch.autograd.Function):
    """The identity, whose backward puts the gradients into a list, zeros where nothing depends on a tensor.

    Detached and not viewed: autograd lets no layer change a view in place that was made here.
    """

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, caught: list[Tensor], *received: Tensor) -> tuple[Tensor, ...]:
        ctx.caught = caught
        return tuple([part.detach() for part in received])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.caught.extend(gradients)
        return (None,) * (2 + len(gradients))
