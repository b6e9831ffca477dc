"""What crosses the boundaries of a model, learnt from the model: a process must know it before it receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from optpipe.errors import TrainingError
from optpipe.runtime.evaluation import evaluating
from optpipe.runtime.messages import MessageSpec, Spec, Tree, map_leaves, spec_of
from optpipe.runtime.stage import Stage

Gather = Callable[[Any], list[Any]]
"""Given a JSON value by each process, returns those of all processes, in every process."""


def learn_messages(
    stages: Mapping[int, Stage], count: int, microbatch: Tree, target: Tree, gather: Gather = lambda value: [value]
) -> list[Spec]:
    """The spec of the message at each boundary of a model of `count` stages, of which this process has `stages`.

    Runs each stage forward once, the first on a microbatch of the size that all will have, the others on zeros.
    Called by all processes together, those without the first stage too. Raises TrainingError where a stage returns
    what cannot be a message.
    """
    specs: list[Spec] = []
    received = microbatch
    for s in range(count - 1):
        mine = _to_data(_output(stages[s], received, target)) if s in stages else None
        [found] = [data for data in gather(mine) if data is not None]
        specs.append(_from_data(found))
        received = map_leaves(_zeros_on(stages[s + 1].device), specs[-1]) if s + 1 in stages else None
    return specs


def _output(stage: Stage, received: Tree, target: Tree) -> Spec:
    with evaluating([stage.module]):
        return spec_of(stage.evaluate(0, received, target))


def _zeros_on(device: torch.device) -> Callable[[MessageSpec], Tensor]:
    return lambda spec: spec.empty(device).zero_()


def _to_data(spec: Spec) -> Any:
    """A spec as JSON, in which a named tuple would lose its names."""
    if hasattr(spec, "_fields"):
        raise TrainingError(
            f"a stage returned the named tuple {type(spec).__name__}, whose names other processes do not know. "
            "Maybe return a dict, or a plain tuple."
        )
    if isinstance(spec, tuple | list):
        return {type(spec).__name__: [_to_data(part) for part in spec]}
    if isinstance(spec, dict):
        return {"dict": {key: _to_data(part) for key, part in spec.items()}}
    return {"tensor": [str(spec.dtype).removeprefix("torch."), list(spec.shape)]}


def _from_data(data: Any) -> Spec:
    [(kind, value)] = data.items()
    if kind == "tensor":
        dtype, shape = value
        return MessageSpec(tuple(shape), getattr(torch, dtype))
    if kind == "dict":
        return {key: _from_data(part) for key, part in value.items()}
    parts = [_from_data(part) for part in value]
    return parts if kind == "list" else tuple(parts)
