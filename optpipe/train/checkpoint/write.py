"""A stage as named tensors, and back: parameters, buffers and what the optimizer keeps of each parameter.

Names are those of the module: `parameter.0.norm.weight`, `buffer.0.running_mean`, `optimizer.exp_avg.0.norm.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from optpipe.errors import CheckpointError


def stage_tensors(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, elsewhere: Collection[str] = ()
) -> dict[str, Tensor]:
    """Copies on the CPU, none of which shares memory with another.

    Buffers that are not persistent are left out, as the module builds them anew, and so is all of the parameters
    `elsewhere`, which are written with another stage. Raises CheckpointError where module or optimizer keep state that
    is not in tensors.
    """
    _refuse_extra_state(module)
    named = chain(_weights(module), _optimizer_state(module, optimizer))
    return _copies((name, tensor) for name, tensor in named if parameter_of(name) not in elsewhere)


def stage_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Of `stage_tensors` the buffers alone: what differs between replicas, as each has seen its own microbatches."""
    return _copies(_buffers(module))


def load_stage(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, tensors: Mapping[str, Tensor], where: str
) -> None:
    """Put saved tensors into a module and its optimizer, on whatever device these are.

    Nothing is cast. Raises CheckpointError naming the first tensor that is missing, too many or of another kind.
    """
    weights = dict(_weights(module))
    saved = {name for name in tensors if not name.startswith("optimizer.")}
    for name in sorted(weights.keys() | saved):
        _compare(where, name, tensors.get(name), weights.get(name))
    parameters = dict(module.named_parameters())
    states = _states_of(tensors)
    for name in states:
        if name not in parameters:
            raise CheckpointError(f"{where}: the checkpoint has optimizer state of {name}, which is no parameter now.")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[name])
    if optimizer is not None:
        _load_optimizer(optimizer, parameters, states)


def parameter_of(name: str) -> str | None:
    """The parameter that a saved tensor is, or that an optimizer keeps it of; None for a buffer."""
    kind, _, rest = name.partition(".")
    return {"parameter": rest, "optimizer": rest.partition(".")[2]}.get(kind)


def renamed(name: str, parameter: str) -> str:
    """The name of a saved tensor of a parameter, as that of another parameter."""
    old = parameter_of(name)
    assert old is not None, "buffers are no parameter's"
    return name.removesuffix(old) + parameter


def _copies(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named}


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        yield f"parameter.{name}", parameter
    yield from _buffers(module)


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in part._non_persistent_buffers_set:
                yield f"buffer.{name}", buffer


def _optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    if optimizer is None:
        return
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"optimizer.{key}.{name}", value
            elif value is not None:
                raise CheckpointError(
                    f"the optimizer keeps {key} of {name} as {type(value).__name__}, but only tensors are written."
                )


def _states_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors by parameter, then by key."""
    states: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        kind, _, rest = full.partition(".")
        if kind == "optimizer":
            key, _, name = rest.partition(".")
            states.setdefault(name, {})[key] = tensor
    return states


def _load_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], states: Mapping[str, dict[str, Tensor]]
) -> None:
    """Not by `load_state_dict`, which casts moments to the parameter's dtype."""
    optimizer.state.clear()
    on_device = {p for group in optimizer.param_groups if _keeps_steps_on_device(group) for p in group["params"]}
    for name, state in states.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: tensor.to(parameter.device if tensor.dim() or parameter in on_device else "cpu", copy=True)
            for key, tensor in state.items()
        }


def _keeps_steps_on_device(group: Mapping[str, object]) -> bool:
    """Torch's optimizers count steps in a scalar on the CPU, but for these."""
    return bool(group.get("fused") or group.get("capturable"))


def _compare(where: str, name: str, saved: Tensor | None, now: Tensor | None) -> None:
    if saved is None or now is None:
        there, not_there = ("the model", "the checkpoint") if saved is None else ("the checkpoint", "the model")
        raise CheckpointError(f"{where}.{name} is in {there} but not in {not_there}. {_OTHER_MODEL}")
    if (saved.dtype, saved.shape) != (now.dtype, now.shape):
        raise CheckpointError(
            f"{where}.{name} is {saved.dtype} of shape {tuple(saved.shape)} in the checkpoint but {now.dtype} of shape "
            f"{tuple(now.shape)} now. {_OTHER_MODEL}"
        )


_OTHER_MODEL = "Maybe the code of the model has changed since."


def _refuse_extra_state(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"{name or 'the stage'} ({type(part).__name__}) has extra state beside its tensors, which is not "
                "written. Maybe keep it in buffers."
            )
