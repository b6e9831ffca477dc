"""Models of transformers in which the modules of other stages are replaced by placeholders that pass inputs on."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optpipe.runtime.torch_private import tree_map_only

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Absent(nn.Module):
    """Placeholder for a module of another stage: passes its first floating-point argument on.

    A module that gets none, such as an embedding of token ids, is replaced by zeros of the shape of its output.
    Attributes are those of the module `stands_for`, which stays on the meta device. `in_tuple`: return a tuple of one
    value, as layers of some models do.
    """

    def __init__(self, stands_for: nn.Module, *, in_tuple: bool = False) -> None:
        super().__init__()
        self.__dict__["_stands_for"] = stands_for  # not a child
        self.__dict__["in_tuple"] = in_tuple

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_stands_for":
                raise
            return getattr(self.__dict__["_stands_for"], name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The first floating-point tensor among the arguments; zeros for a module that makes tensors from others."""
        of_others = isinstance(self.__dict__["_stands_for"], nn.Embedding)  # some look positions up by a mask
        module = self.__dict__["_stands_for"]
        for value in (*inputs, *named.values()):
            if isinstance(value, Tensor) and value.is_floating_point() and not of_others:
                projects = isinstance(module, nn.Linear) and value.shape[-1] == module.in_features
                if projects and module.in_features != module.out_features:
                    break  # between embeddings and hidden states of another size
                return self._returned(value)
        return self._zeros(*inputs, **named)

    def _returned(self, value: Any) -> Any:
        return (value,) if self.__dict__["in_tuple"] else value

    def _zeros(self, *inputs: Any, **named: Any) -> Any:
        """Zeros in place of the tensors that the module makes of these arguments."""
        # Some models move ids to the device of the embedding's weight, which is none here.
        devices = [value.device for value in (*inputs, *named.values()) if isinstance(value, Tensor)]
        device = next((device for device in devices if device.type != "meta"), None)

        def zeros(tensor: Tensor) -> Tensor:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)

        return tree_map_only(Tensor, zeros, on_meta(self.__dict__["_stands_for"], inputs, named))

    def __repr__(self) -> str:
        return f"{type(self.__dict__['_stands_for']).__name__} of another stage"


def give_buffers(model: nn.Module) -> None:
    """Put ones on the CPU in place of a model's buffers that are on the meta device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.ones_like(buffer, device="cpu")


def on_meta(module: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The output of a module on the meta device for arguments of any device: shapes and dtypes alone."""
    inputs, named = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (tuple(inputs), dict(named)))
    with torch.no_grad():
        return module(*inputs, **named)


class Received(Absent):
    """Placeholder for the layer before a stage's own: returns what the stage has received, not its argument."""

    def __init__(self, stands_for: nn.Module, *, in_tuple: bool = False) -> None:
        super().__init__(stands_for, in_tuple=in_tuple)
        self.__dict__["received"] = None

    def forward(self, *_inputs: Any, **_named: Any) -> Any:
        """The hidden states from the stage before."""
        return self._returned(self.__dict__["received"])


def pruned_copy(
    whole: PreTrainedModel,
    spine: Sequence[str],
    keep: Collection[str],
    absent: type[Absent] | None = None,
    in_tuple: str | None = None,
) -> PreTrainedModel:
    """A copy of the model with the same modules to `keep`, copies of those without parameters, and placeholders.

    `spine`: names of the modules from the model itself, "", to the one with the list of layers. `absent`: the kind of
    placeholder, `Absent` if None. `in_tuple`: name of the list of layers, if these return tuples.
    """
    memo: dict[int, nn.Module] = {}
    for name in reversed(spine):
        module = whole.get_submodule(name)
        new = copy.copy(module)
        for table in ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"):
            new.__dict__[table] = copy.copy(module.__dict__[table])
        memo[id(module)] = new
    for parent in spine:
        new = memo[id(whole.get_submodule(parent))]
        for name, child in new._modules.items():
            if child is None:
                continue
            if id(child) in memo:
                new._modules[name] = memo[id(child)]
            elif isinstance(child, nn.ModuleList) and (f"{parent}.{name}" if parent else name) not in keep:
                new._modules[name] = nn.ModuleList(child)
            elif next(child.parameters(), None) is None and not isinstance(child, nn.ModuleList):
                new._modules[name] = copy.deepcopy(child)
    model: Any = memo[id(whole)]
    prune(model, spine, keep, absent or Absent, in_tuple)
    pruned: PreTrainedModel = model
    return pruned


def prune(
    model: nn.Module,
    spine: Sequence[str],
    keep: Collection[str],
    absent: type[Absent],
    in_tuple: str | None = None,
) -> None:
    """Replace the children of the modules of the `spine`, and the layers in their lists, except those to `keep`."""
    for parent in spine:
        for name, child in model.get_submodule(parent).named_children():
            full = f"{parent}.{name}" if parent else name
            if full in spine or full in keep:
                continue
            if isinstance(child, nn.ModuleList):
                for n, layer in enumerate(child):
                    if f"{full}.{n}" not in keep:
                        child[n] = absent(layer, in_tuple=full == in_tuple)
            else:
                setattr(model.get_submodule(parent), name, absent(child))
    # transformers expects both of two tied weights to be there.
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    model.all_tied_weights_keys = {one: other for one, other in tied.items() if one in names and other in names}  # type: ignore[assignment]
