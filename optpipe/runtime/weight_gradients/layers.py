"""Which kinds of layers split their backward, and how others join them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from optpipe.errors import TrainingError
from optpipe.runtime.weight_gradients.convolution import CONVOLUTIONS, SplitConvolution
from optpipe.runtime.weight_gradients.embedding import SplitEmbedding
from optpipe.runtime.weight_gradients.linear import SplitLinear
from optpipe.runtime.weight_gradients.pending import WeightGradients
from optpipe.runtime.weight_gradients.split import Deferred, Layer, SplitBackward

_SPLITS: dict[type[nn.Module], SplitBackward[Any]] = {
    nn.Linear: SplitLinear(),
    nn.Embedding: SplitEmbedding(),
    **dict.fromkeys(CONVOLUTIONS, SplitConvolution()),
}

_CLASSES: dict[type[nn.Module], type[Deferred]] = {}


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

    Layers whose `forward` or weights are not their own (patched, parametrized, pruned) are left to autograd, as are
    all of other kinds: those get their weight gradients in B. Norm layers are, because they would not pay: of a block
    of the small GPT they would add 24 % to what is held between B and W, and take 0.3 % from B. Batch norm is among
    them, so F updates its running statistics as ever (once more where a checkpoint runs F again).
    """
    if isinstance(module, Deferred):
        if module._weight_gradients is not pending:
            module._weight_gradients.lose()
        module._weight_gradients = pending
        return
    split = _SPLITS.get(_own_class(module))
    if split is not None and _is_its_own(module) and split.handles(module):
        module.__class__ = _deferred_class(type(module), split)
        module._weight_gradients = pending  # type: ignore[assignment]
        return
    for child in module.children():
        defer_weight_gradients(child, pending)


def undeferred_layers(module: nn.Module) -> Mapping[str, Mapping[str, nn.Module]]:
    """The layers whose weight gradients are computed in B, by the name of their class and their own in `module`.

    For a module that `defer_weight_gradients` has seen. Layers whose parameters are all vectors (norms, biases) are
    left out: their gradients are sums, which would not pay.
    """
    found: dict[str, dict[str, nn.Module]] = {}

    def look(name: str, part: nn.Module) -> None:
        if isinstance(part, Deferred) and part.may_split():
            return
        matrices = [p for p in part.parameters(recurse=False) if p.requires_grad and p.dim() > 1]
        if matrices:
            kind = part._plain if isinstance(part, Deferred) else type(part)
            found.setdefault(kind.__name__, {})[name] = part
        for child, inner in part.named_children():
            look(f"{name}.{child}" if name else child, inner)

    look("", module)
    return found


def _deferred_class(plain: type[nn.Module], split: SplitBackward[Any]) -> type[Deferred]:
    """The class of layers that were of class `plain`; one for all of them."""
    if plain not in _CLASSES:
        name, members = f"Deferred{plain.__name__}", {"_split": split, "_plain": plain}
        _CLASSES[plain] = type(name, (Deferred, plain), members)
    return _CLASSES[plain]


def _own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before `fully_shard` made one of it that is called alike and computes the same."""
    kind = type(module)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nothing was wrapped it need not be loaded
    if fsdp is None or not issubclass(kind, fsdp.FSDPModule):
        return kind
    first, *_ = (base for base in kind.__mro__[1:] if not issubclass(base, fsdp.FSDPModule))
    return first if issubclass(first, nn.Module) else kind


def _is_its_own(module: nn.Module) -> bool:
    return "forward" not in vars(module) and not hasattr(module, "parametrizations")


def compiled_part(module: nn.Module) -> str | None:
    """The name of the first part of `module` that torch.compile has taken, "" for all of it; None without one."""
    return next((name for name, part in module.named_modules() if _is_compiled(part)), None)


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def compiler_failure(error: Exception) -> str | None:
    """A failure of torch.compile in a line; None for an error that is not the compiler's."""
    dynamo = sys.modules.get("torch._dynamo.exc")  # where nothing was compiled it need not be loaded
    if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
        return None
    lines = [*str(error).strip().splitlines(), "", ""]
    text = f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") else lines[0]  # "backend=... raised:", then what
    return f"{type(error).__name__}: {text.rstrip('.')}"
