"""Split backwards: a layer's backward gives its input gradient at once and leaves its weight gradient for W.

Autograd alone cannot split a backward cheaply: asked for the input gradients only, it keeps the whole graph for a
second pass. So linear, embedding and layer norm modules are replaced by ones that share their parameters and
whose backward hands (input, output gradient) to a `WeightGradients`. What is then held between B and W is those two
tensors for each layer, and W is one matrix product a layer. Parameters of any other module get their gradient in B.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from optpipe.errors import TrainingError

Task = Callable[[], None]


class WeightGradients:
    """The weight gradients of one stage that are still to be computed, by microbatch.

    They are added to `.grad`, which must exist: its bytes belong to the parameters, not to the step.
    """

    def __init__(self) -> None:
        self._kept: dict[int, deque[Task]] = {}
        self._open: deque[Task] | None = None

    @contextmanager
    def kept_for(self, microbatch: int) -> Iterator[None]:
        """Within: weight gradients wait for `compute`. Elsewhere they are computed at once."""
        self._open = self._kept.setdefault(microbatch, deque())
        try:
            yield
        finally:
            self._open = None

    def add(self, task: Task) -> None:
        """Called by a layer's backward."""
        if self._open is None:
            task()
        else:
            self._open.append(task)

    def compute(self, microbatch: int) -> None:
        """Compute what B of this microbatch left, layer by layer; each layer's tensors are freed as it is done."""
        tasks = self._kept.pop(microbatch)
        with torch.no_grad():
            while tasks:
                tasks.popleft()()

    def clear(self) -> None:
        """Drop everything that is kept."""
        self._kept.clear()


def defer_weight_gradients(module: nn.Module, sink: WeightGradients) -> nn.Module:
    """Replace the linear, embedding and layer norm modules in `module`, in place; returns what stands for `module`.

    Raises TrainingError for a compiled module: torch.compile would undo the split without a word.
    """
    if hasattr(module, "_orig_mod"):
        raise TrainingError(
            f"{type(module._orig_mod).__name__} is compiled, but its backward is to be split into B and W. "
            "Maybe hand over the module before torch.compile."
        )
    if type(module) in _DEFERRED and _is_plain(module):
        return _DEFERRED[type(module)](module, sink)
    for name, child in module.named_children():
        setattr(module, name, defer_weight_gradients(child, sink))
    return module


def _is_plain(module: nn.Module) -> bool:
    """Whether an embedding's gradient is the plain dense sum (the others are left to autograd)."""
    if not isinstance(module, nn.Embedding):
        return True
    special = (module.padding_idx, module.max_norm)
    return special == (None, None) and not module.sparse and not module.scale_grad_by_freq


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "gradients are allocated before a step"
    return parameter.grad


class _DeferredLinear(nn.Module):
    def __init__(self, linear: nn.Linear, sink: WeightGradients) -> None:
        super().__init__()
        self.weight, self.bias, self.sink = linear.weight, linear.bias, sink

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Linear.apply(x, self.weight, self.bias, self.sink)  # type: ignore[no-untyped-call]
        return result


class _Linear(torch.autograd.Function):
    """``y = x @ weight.T + bias`` for x of shape (..., inputs) and weight of shape (outputs, inputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, sink: WeightGradients) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.sink = weight, bias, sink
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.sink.add(partial(_add_linear, ctx.weight, ctx.bias, x.detach(), grad_y))
        grad_x = grad_y @ ctx.weight if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None


def _add_linear(weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, grad_y: Tensor) -> None:
    rows = grad_y.reshape(-1, grad_y.shape[-1])
    if weight.requires_grad:
        _gradient(weight).addmm_(rows.T, x.reshape(-1, x.shape[-1]))
    if bias is not None and bias.requires_grad:
        _gradient(bias).add_(rows.sum(0))


class _DeferredEmbedding(nn.Module):
    def __init__(self, embedding: nn.Embedding, sink: WeightGradients) -> None:
        super().__init__()
        self.weight, self.sink = embedding.weight, sink

    def forward(self, index: Tensor) -> Tensor:
        result: Tensor = _Embedding.apply(index, self.weight, self.sink)  # type: ignore[no-untyped-call]
        return result


class _Embedding(torch.autograd.Function):
    """Rows of weight (entries, width) at `index` of any shape."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: nn.Parameter, sink: WeightGradients) -> Tensor:
        ctx.save_for_backward(index)
        ctx.weight, ctx.sink = weight, sink
        return nn.functional.embedding(index, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[None, None, None]:
        (index,) = ctx.saved_tensors
        ctx.sink.add(partial(_add_embedding, ctx.weight, index, grad_y))
        return None, None, None


def _add_embedding(weight: nn.Parameter, index: Tensor, grad_y: Tensor) -> None:
    if weight.requires_grad:
        _gradient(weight).add_(torch.ops.aten.embedding_dense_backward(grad_y, index, len(weight), -1, False))


class _DeferredLayerNorm(nn.Module):
    def __init__(self, norm: nn.LayerNorm, sink: WeightGradients) -> None:
        super().__init__()
        self.weight, self.bias, self.sink = norm.weight, norm.bias, sink
        self.shape, self.eps = list(norm.normalized_shape), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _LayerNorm.apply(x, self.weight, self.bias, self.shape, self.eps, self.sink)  # type: ignore[no-untyped-call]
        return result


class _LayerNorm(torch.autograd.Function):
    """Layer norm over the last dimensions, which have `shape`; mean and rstd are kept with the input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        shape: list[int],
        eps: float,
        sink: WeightGradients,
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias, ctx.shape, ctx.sink = weight, bias, shape, sink
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        x, mean, rstd = ctx.saved_tensors
        if ctx.weight is not None:
            ctx.sink.add(partial(_add_layer_norm, ctx.weight, ctx.bias, ctx.shape, x.detach(), mean, rstd, grad_y))
        grad_x = None
        if ctx.needs_input_grad[0]:
            only_input = [True, False, False]
            grad_x = _layer_norm_backward(grad_y, x, ctx.shape, mean, rstd, ctx.weight, ctx.bias, only_input)[0]
        return grad_x, None, None, None, None, None


_layer_norm_backward = torch.ops.aten.native_layer_norm_backward


def _add_layer_norm(
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    shape: list[int],
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    grad_y: Tensor,
) -> None:
    wanted = [False, weight.requires_grad, bias is not None and bias.requires_grad]
    _, grad_weight, grad_bias = _layer_norm_backward(grad_y, x, shape, mean, rstd, weight, bias, wanted)
    for parameter, gradient, asked in ((weight, grad_weight, wanted[1]), (bias, grad_bias, wanted[2])):
        if parameter is not None and asked:
            _gradient(parameter).add_(gradient)


_DEFERRED: dict[type[nn.Module], Callable[[Any, WeightGradients], nn.Module]] = {
    nn.Linear: _DeferredLinear,
    nn.Embedding: _DeferredEmbedding,
    nn.LayerNorm: _DeferredLayerNorm,
}
