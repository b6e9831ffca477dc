"""Layers with a deferred weight gradient (linear, embedding, convolution), and their registry.

Linear, for width 256 and 512 rows: B 0.86 ms and W 0.79 ms, where autograd takes 1.5 ms for both at once. From B to
W two activations are held, one of which F held already.

Embedding: autograd makes a dense gradient of the size of the table first. For 50,000 rows of 256 and 512 indices a
backward then takes 28 ms instead of 0.1, and 52 MB of workspace instead of 0.5.

Convolution, for 64 channels, 3 x 3 kernels and 8 images of 32 x 32: B 6.3 ms, W 7.2 ms, both at once 13.7 ms.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.errors import TrainingError
from optpipe.runtime.torch_private import is_compiler_error
from optpipe.runtime.weight_gradients.products import DeferredProducts, matrices
from optpipe.runtime.weight_gradients.split import (
    Deferred,
    Layer,
    Saved,
    SplitBackward,
    WeightGradients,
    accumulate,
    gradient_dtype,
    gradient_of,
    is_distributed,
    is_leaf,
    rows,
)


class SplitLinear(SplitBackward[nn.Linear]):
    """``y = x @ weight.T + bias`` for x of shape (..., inputs) and weight of shape (outputs, inputs)."""

    distributed = True
    lower_precision = True

    def handles(self, layer: nn.Linear) -> bool:
        """True if the weight is a parameter."""
        return own_weight(layer)

    def forward(self, layer: nn.Linear, x: Tensor) -> tuple[Tensor, Saved]:
        """``x @ weight.T + bias``; keeps the input."""
        return nn.functional.linear(x, layer.weight, layer.bias), (x,)

    def input_gradient(self, layer: nn.Linear, _saved: Saved, gradient: Tensor) -> Tensor:
        """``gradient @ weight``, of a complex weight its conjugate, as autograd defines gradients."""
        return gradient @ layer.weight.conj()

    def add_weight_gradients(self, layer: nn.Linear, saved: Saved, gradient: Tensor) -> None:
        """Add ``gradient.T @ x.conj()`` to the weight's, and the sum over rows to the bias's."""
        weight, bias, (x,) = layer.weight, layer.bias, saved
        of_rows, inputs = rows(gradient), rows(x).conj()
        if weight.requires_grad and gradient_dtype(weight) == x.dtype and not is_distributed(weight):
            gradient_of(weight).addmm_(of_rows.T, inputs)  # needs no room for the product
        elif weight.requires_grad:
            accumulate(weight, of_rows.T @ inputs)
        if bias is not None and bias.requires_grad:
            accumulate(bias, of_rows.sum(0))


def own_weight(layer: nn.Module) -> bool:
    """True if the weight is a parameter: not computed from others (weight norm, pruning), and not lazy."""
    weight = layer._parameters.get("weight")
    return is_leaf(weight) and not nn.parameter.is_lazy(weight)


class SplitEmbedding(SplitBackward[nn.Embedding]):
    """Rows of weight (entries, width) at indices of any shape."""

    def handles(self, layer: nn.Embedding) -> bool:
        """False for sparse or frequency-scaled gradients, and if the forward changes the weight."""
        return own_weight(layer) and not (layer.sparse or layer.scale_grad_by_freq or layer.max_norm)

    def forward(self, layer: nn.Embedding, x: Tensor) -> tuple[Tensor, Saved]:
        """Look the rows up; keeps the indices."""
        return nn.functional.embedding(x, layer.weight), (x,)

    def input_gradient(self, _layer: nn.Embedding, _saved: Saved, _gradient: Tensor) -> Tensor:
        """Never called: indices have no gradient."""
        raise AssertionError("indices have no gradient")

    def add_weight_gradients(self, layer: nn.Embedding, saved: Saved, gradient: Tensor) -> None:
        """Add each position's gradient to the row of its index, padding left out."""
        (index,) = saved
        if layer.padding_idx is not None:
            gradient = gradient.masked_fill((index == layer.padding_idx).unsqueeze(-1), 0)
        of_all = gradient_of(layer.weight)
        of_all.index_add_(0, index.reshape(-1), rows(gradient).to(of_all.dtype))


TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)


class SplitConvolution(SplitBackward[Any]):
    """Any convolution padded with as many zeros on one side as on the other."""

    lower_precision = True

    def handles(self, layer: Convolution) -> bool:
        """True if the weight is a parameter of real numbers and the padding is zeros of given widths.

        Torch's own backward of a convolution is none of complex numbers: it makes those of several real ones.
        """
        zeros = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return own_weight(layer) and zeros and not layer.weight.is_complex()

    def forward(self, layer: Any, x: Tensor) -> tuple[Tensor, Saved]:
        """Run the plain layer, and keep the input."""
        return layer._plain.forward(layer, x), (x,)

    def input_gradient(self, layer: Convolution, saved: Saved, gradient: Tensor) -> Tensor:
        """The gradient of the input, by torch's own backward of a convolution."""
        (x,) = saved
        found, _, _ = _backward(layer, x, gradient, [True, False, False])
        assert found is not None, "it was asked for"
        return found.view_as(x)

    def add_weight_gradients(self, layer: Convolution, saved: Saved, gradient: Tensor) -> None:
        """Add those of weight and bias that are wanted, by the same function."""
        parameters = (layer.weight, layer.bias)
        wanted = [parameter is not None and parameter.requires_grad for parameter in parameters]
        _, *found = _backward(layer, saved[0], gradient, [False, *wanted])
        for parameter, its_gradient in zip(parameters, found, strict=True):
            if its_gradient is not None:
                accumulate(parameter, its_gradient)


def _backward(layer: Convolution, x: Tensor, gradient: Tensor, wanted: list[bool]) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias that are wanted, None for the others."""
    weight = layer.weight.to(x.dtype)
    if x.dim() < weight.dim():
        x, gradient = x.unsqueeze(0), gradient.unsqueeze(0)
    found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
        gradient,
        x,
        weight,
        [layer.out_channels],
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.transposed,
        layer.output_padding,
        layer.groups,
        wanted,
    )
    return found


_SPLITS: dict[type[nn.Module], SplitBackward[Any]] = {
    nn.Linear: SplitLinear(),
    nn.Embedding: SplitEmbedding(),
    **dict.fromkeys(CONVOLUTIONS, SplitConvolution()),
}

_CLASSES: dict[tuple[type[nn.Module], SplitBackward[Any] | None], type[Deferred]] = {}


def register_deferred(kind: type[Layer], split: SplitBackward[Layer]) -> None:
    """From now on, layers of exactly this class split their backward in stages that are made.

    A subclass may compute something else, so it is registered by itself. A subclass of nn.Linear that only
    initialises differently needs no split of its own::

        from optpipe.runtime.weight_gradients import SplitBackward, SplitLinear, accumulate, register_deferred

        register_deferred(ScaledInitLinear, SplitLinear())

    A layer of another kind says what its two halves are::

        class Scale(nn.Module):                       # y = x * weight
            def __init__(self, width):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(width))

            def forward(self, x):
                return x * self.weight

        class SplitScale(SplitBackward[Scale]):
            def forward(self, layer, x):
                return x * layer.weight, (x,)

            def input_gradient(self, layer, saved, gradient):
                return gradient * layer.weight

            def add_weight_gradients(self, layer, saved, gradient):
                (x,) = saved
                accumulate(layer.weight, (gradient * x).flatten(0, -2).sum(0))

        register_deferred(Scale, SplitScale())

    Raises TrainingError if the class is registered already.
    """
    if kind in _SPLITS:
        raise TrainingError(f"{kind.__name__} is registered already, with {type(_SPLITS[kind]).__name__}.")
    _SPLITS[kind] = split


def defer_weight_gradients(module: nn.Module, pending: WeightGradients) -> None:
    """Let all layers in `module` of a registered kind leave their weight gradients to `pending`.

    So do those of other kinds that multiply by matrices of their own (`Products`). Layers whose `forward` or weights
    are not their own (patched, parametrized, pruned) are left to autograd: they get their weight gradients in B. Norm
    layers are, because they would not pay: of a block of the small GPT they would add 24 % to what is held between B
    and W, and take 0.3 % from B. Batch norm is among them, so F updates its running statistics as ever (once more where
    a checkpoint runs F again).
    """
    if isinstance(module, Deferred):
        if module._weight_gradients is not pending:
            module._weight_gradients.lose()
        module._weight_gradients = pending
        if not isinstance(module, DeferredProducts):
            return
    split = _SPLITS.get(_own_class(module))
    if split is not None and _is_its_own(module) and split.handles(module):
        module.__class__ = _deferred_class(type(module), split)
        module._weight_gradients = pending  # type: ignore[assignment]
        return
    unknown = split is None and not isinstance(module, Deferred)
    if unknown and _is_its_own(module) and _runs(module) and matrices(module):
        module.__class__ = _deferred_class(type(module), None)
        module._weight_gradients, module._deferred = pending, {}  # type: ignore[assignment]
    for child in module.children():
        defer_weight_gradients(child, pending)


def undeferred_layers(module: nn.Module) -> Mapping[str, Mapping[str, nn.Module]]:
    """The layers whose weight gradients are computed in B, by the name of their class and their own in `module`.

    For a module that `defer_weight_gradients` has seen. Of layers without a registered split all are, until a forward
    in a stage has shown what they do with their matrices. Layers whose parameters are all vectors (norms, biases) are
    left out: their gradients are sums, which would not pay.
    """
    found: dict[str, dict[str, nn.Module]] = {}

    def look(name: str, part: nn.Module) -> None:
        if isinstance(part, Deferred) and not isinstance(part, DeferredProducts) and part.may_split():
            return
        if part.left() if isinstance(part, DeferredProducts) else matrices(part):
            kind = part._plain if isinstance(part, Deferred) else type(part)
            found.setdefault(kind.__name__, {})[name] = part
        for child, inner in part.named_children():
            look(f"{name}.{child}" if name else child, inner)

    look("", module)
    return found


def _deferred_class(plain: type[nn.Module], split: SplitBackward[Any] | None) -> type[Deferred]:
    """The class of layers that were of class `plain`; one for all of them. Without a split products are deferred."""
    if (plain, split) not in _CLASSES:
        base = DeferredProducts if split is None else Deferred

        @functools.wraps(plain.forward)  # torchtitan reads the signature of a layer's forward
        def forward(self: Deferred, *inputs: Any, **named: Any) -> Any:
            return base.forward(self, *inputs, **named)

        members = {"_split": split, "_plain": plain, "forward": forward}
        _CLASSES[plain, split] = type(f"Deferred{plain.__name__}", (base, plain), members)
    return _CLASSES[plain, split]


def _own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before `fully_shard` made one of it that is called alike and computes the same."""
    kind = type(module)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nothing was wrapped it need not be loaded
    if fsdp is None or not issubclass(kind, fsdp.FSDPModule):
        return kind
    first, *_ = (base for base in kind.__mro__[1:] if not issubclass(base, fsdp.FSDPModule))
    return first if issubclass(first, nn.Module) else kind


def _runs(module: nn.Module) -> bool:
    """False for containers, which have no forward: their parameters are used by others; and for what torch.jit made."""
    return not isinstance(module, torch.jit.ScriptModule) and type(module).forward is not nn.Module.forward


def _is_its_own(module: nn.Module) -> bool:
    return "forward" not in vars(module) and not hasattr(module, "parametrizations")


def compiled_part(module: nn.Module) -> str | None:
    """The name of the first part of `module` that torch.compile has taken, "" for all of it; None without one."""
    return next((name for name, part in module.named_modules() if _is_compiled(part)), None)


def compiled_around(module: nn.Module, name: str) -> str | None:
    """The name of the module that torch.compile has taken around the part `name` of `module`; None without one."""
    path = name.split(".") if name else []
    around = (".".join(path[:depth]) for depth in range(len(path)))
    return next((outer for outer in around if _is_compiled(module.get_submodule(outer))), None)


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def compiler_failure(error: Exception) -> str | None:
    """A failure of torch.compile in a line; None for an error that is not the compiler's."""
    if not is_compiler_error(error):
        return None
    lines = [*str(error).strip().splitlines(), "", ""]
    text = f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") else lines[0]  # "backend=... raised:", then what
    return f"{type(error).__name__}: {text.rstrip('.')}"
