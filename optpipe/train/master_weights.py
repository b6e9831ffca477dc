"""Float32 copies of parameters of lower precision, which an optimizer updates in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class MasterWeights(torch.optim.Optimizer):
    """The optimizer that `make` builds for float32 copies of the named parameters, to which these are rounded.

    The state of a parameter is that of its copy, and the copy itself as `master`: so snapshots and checkpoints have it.
    Gradients may have either precision.
    """

    def __init__(self, named: NamedParameters, make: Callable[[NamedParameters], torch.optim.Optimizer]) -> None:
        copies = [(name, nn.Parameter(p.detach().float())) for name, p in named]
        self.inner = make(copies)
        self._copies = [(p, copy) for (_, p), (_, copy) in zip(named, copies, strict=True)]
        parameters = {id(copy): p for p, copy in self._copies}
        groups: list[dict[str, Any]] = [
            group | {"params": [parameters[id(copy)] for copy in group["params"]]} for group in self.inner.param_groups
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the copies and round them."""
        assert closure is None, "no step is evaluated again"
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key != "params"})
        for parameter, copy in self._copies:
            state = dict(self.state.get(parameter, {}))
            if state:  # of the last step, of a snapshot or of a checkpoint
                copy.data = state.pop("master")
                self.inner.state[copy] = state
            else:
                self.inner.state.pop(copy, None)
                copy.copy_(parameter)
            copy.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        for parameter, copy in self._copies:
            copy.grad = None
            parameter.copy_(copy)
            self.state[parameter] = {"master": copy.data, **self.inner.state[copy]}
