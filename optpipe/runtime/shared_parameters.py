"""Shared (tied) parameters: one tensor object in several stages of a model.

A process holds such a parameter once: its stages on one device hold the very same parameter, those on
another of its devices an alias, which has the same memory but a gradient of its own, because two devices of one GPU
compute on two streams. Between processes `GradientSync` sums its gradients, and each process updates what it holds.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optpipe.errors import TrainingError

Place = tuple[int, str]
"""A stage, and the name of a parameter in its module: the first, where the module has it several times."""


@dataclass(frozen=True)
class SharedParameter:
    """A parameter of at least two stages. `places` ascend: the first counts it in norms and keeps it in checkpoints.

    Frozen ones (`trained` is false) have no gradient to sum.
    """

    places: tuple[Place, ...]
    trained: bool

    def __str__(self) -> str:
        return " = ".join(place_text(place) for place in self.places)

    def places_in(self, stages: Collection[int]) -> list[Place]:
        """The places in these stages; the first of those of a process has the optimizer there."""
        return [place for place in self.places if place[0] in stages]


def place_text(place: Place) -> str:
    """A place for people."""
    return f"stages[{place[0]}].{place[1]}"


def shared_parameters(stages: Sequence[nn.Module]) -> list[SharedParameter]:
    """Parameters that several stages hold by identity, by their first places.

    Raises TrainingError if stages share state that cannot be kept consistent: memory of two different parameters, or of
    a parameter and a buffer, that overlap, or running statistics.
    """
    _refuse_shared_statistics(stages)
    _refuse_overlaps(stages)
    parameters: dict[int, nn.Parameter] = {}
    places: dict[int, list[Place]] = defaultdict(list)
    for s, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            parameters[id(parameter)] = parameter
            places[id(parameter)].append((s, name))
    return [
        SharedParameter(tuple(found), parameters[key].requires_grad) for key, found in places.items() if len(found) > 1
    ]


def shared_buffers(stages: Sequence[nn.Module]) -> list[tuple[Place, ...]]:
    """The places of each buffer that several stages hold by identity, as in `SharedParameter.places`.

    Read-only ones, such as the frequencies of rotary embeddings, are common and harmless.
    """
    places: dict[int, list[Place]] = defaultdict(list)
    for s, stage in enumerate(stages):
        for name, buffer in stage.named_buffers():
            places[id(buffer)].append((s, name))
    return [tuple(found) for found in places.values() if len(found) > 1]


def with_own_modules(stages: Sequence[nn.Module]) -> list[nn.Module]:
    """The stages, in which each module with parameters belongs to one stage alone.

    Where a later stage has such a module too, it gets another module with the same parameters and buffers, because a
    module that splits its backward does so for one stage.
    """
    owners: dict[int, int] = {}
    return [_with_own_modules(stage, s, owners, {}) for s, stage in enumerate(stages)]


def hold_once(shared: Sequence[SharedParameter], modules: Mapping[int, nn.Module], placement: Sequence[int]) -> None:
    """Let the stages of this process, which are where they will compute, hold each shared parameter once.

    `modules` are this process's stages by number, `placement` the devices of all. Moving a stage may have given it a
    parameter of its own; this also makes one of them again.
    """
    for parameter in shared:
        first: nn.Parameter | None = None
        by_device: dict[int, nn.Parameter] = {}
        for s, name in parameter.places_in(modules):
            held = modules[s].get_parameter(name)
            if first is None:
                first = by_device[placement[s]] = held
            if placement[s] not in by_device:
                by_device[placement[s]] = nn.Parameter(first.detach()) if parameter.trained else first
            _replace(modules[s], held, by_device[placement[s]])


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Everywhere in the module, as an ordinary attribute: some modules keep lists of their weights."""
    if new is old:
        return
    for part in module.modules():
        for name in [name for name, parameter in part._parameters.items() if parameter is old]:
            setattr(part, name, new)


def _with_own_modules(module: nn.Module, stage: int, owners: dict[int, int], copies: dict[int, nn.Module]) -> nn.Module:
    """The module, or its copy for this stage. `owners` are the stages of those seen, `copies` what this stage has."""
    if id(module) in copies:
        return copies[id(module)]
    own = module
    if owners.setdefault(id(module), stage) != stage and next(module.parameters(), None) is not None:
        own = copy.copy(module)
        for name, value in vars(module).items():
            if isinstance(value, dict | list):  # tables of parameters and of modules, lists of weights
                own.__dict__[name] = copy.copy(value)
    copies[id(module)] = copies[id(own)] = own
    for name, child in own._modules.items():
        if child is not None:
            own._modules[name] = _with_own_modules(child, stage, owners, copies)
    return own


def _refuse_shared_statistics(stages: Sequence[nn.Module]) -> None:
    """Each stage would move them in an order that depends on the schedule, and each process its own."""
    seen: dict[int, Place] = {}
    for s, stage in enumerate(stages):
        for prefix, part in stage.named_modules():
            statistics = getattr(part, "running_mean", None)
            place = (s, f"{prefix}.running_mean".lstrip("."))
            if isinstance(statistics, Tensor) and (first := seen.setdefault(id(statistics), place))[0] != s:
                raise TrainingError(
                    f"{place_text(first)} and {place_text(place)} are the same running statistics, which cannot be "
                    "kept equal on several stages. Maybe give each stage a norm layer of its own."
                )


@dataclass(frozen=True)
class _Span:
    """The memory of a tensor, from its first byte to behind its last."""

    device: str
    begin: int
    end: int
    place: Place
    tensor: Tensor


def _refuse_overlaps(stages: Sequence[nn.Module]) -> None:
    """Two tensors of two stages in the same memory, one of them trained: another process would not see the updates."""
    open_spans: list[_Span] = []
    for span in sorted(_spans(stages), key=lambda span: (span.device, span.begin, span.place)):
        open_spans = [other for other in open_spans if other.device == span.device and other.end > span.begin]
        for other in open_spans:
            trained = other.tensor.requires_grad or span.tensor.requires_grad
            if trained and other.tensor is not span.tensor and other.place[0] != span.place[0]:
                raise TrainingError(
                    f"{place_text(other.place)} and {place_text(span.place)} lie in the same memory but are not one "
                    "parameter: one is a slice, a view or the data of the other. Maybe let both be the same "
                    "nn.Parameter, or copy the data."
                )
        open_spans.append(span)


def _spans(stages: Sequence[nn.Module]) -> Iterator[_Span]:
    for s, stage in enumerate(stages):
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            there = not nn.parameter.is_lazy(tensor) and tensor.layout is torch.strided and not tensor.is_meta
            if there and tensor.numel():
                reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
                begin = tensor.data_ptr()
                yield _Span(str(tensor.device), begin, begin + reach * tensor.itemsize, (s, name), tensor)
