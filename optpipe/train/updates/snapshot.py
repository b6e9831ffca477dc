"""Exact copies of what an optimistic step changes, and of what forwards after it may change.

No optimizer is inverted: parameters and optimizer state are copied before the step, buffers (running statistics) after
it. The copies stay allocated: parameters once, and what the optimizer keeps of them (for AdamW twice as much again).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Snapshot:
    """Of the modules and optimizers of one process."""

    def __init__(self, modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._modules, self._optimizers = list(modules), list(optimizers)
        self._copies = _Copies()
        self._states: list[_State] = []
        self._buffers: dict[tuple[nn.Module, str], _Buffer] = {}

    @property
    def size_bytes(self) -> int:
        """Memory that the copies take."""
        buffers = [buffer.copy for buffer in self._buffers.values()]
        return sum(copy.nbytes for copy in (*self._copies.copies, *buffers))

    def take(self) -> None:
        """Remember everything as it is now."""
        self._states = [
            _State(optimizer, parameter, dict(optimizer.state.get(parameter, {})))
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        self._copies.take([tensor for state in self._states for tensor in state.tensors()])
        self._take_buffers()

    def restore(self) -> None:
        """Bring everything back as it was."""
        for state in self._states:
            state.restore()
        self._copies.restore()
        for (module, name), buffer in self._buffers.items():
            buffer.restore()
            module._buffers[name] = buffer.tensor

    def _take_buffers(self) -> None:
        """Only those that have changed since they were last copied."""
        kept = self._buffers
        self._buffers = {}
        for module in self._modules:
            for part in module.modules():
                for name, tensor in part._buffers.items():
                    if tensor is not None:
                        before = kept.get((part, name))
                        current = before is not None and before.is_current(tensor)
                        self._buffers[part, name] = before if before and current else _Buffer.of(tensor)


@dataclass(frozen=True)
class _State:
    """A parameter and what its optimizer kept of it, which is nothing before the first step."""

    optimizer: torch.optim.Optimizer
    parameter: Tensor
    kept: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        return [self.parameter, *(value for value in self.kept.values() if isinstance(value, Tensor))]

    def restore(self) -> None:
        """The same tensors under the same names; their contents are the copies' matter."""
        if self.kept:
            self.optimizer.state[self.parameter] = self.kept
        else:
            self.optimizer.state.pop(self.parameter, None)


@dataclass
class _Buffer:
    tensor: Tensor
    copy: Tensor
    version: int

    @staticmethod
    def of(tensor: Tensor) -> _Buffer:
        return _Buffer(tensor, tensor.detach().clone(), tensor._version)

    def is_current(self, tensor: Tensor) -> bool:
        """Whether the copy is equal: every change in place raises the version of a tensor."""
        return self.tensor is tensor and self.version == tensor._version

    @torch.no_grad()
    def restore(self) -> None:
        if self.version != self.tensor._version:
            self.tensor.copy_(self.copy)
            self.version = self.tensor._version


class _Copies:
    """Copies of a list of tensors, in memory that is used again."""

    def __init__(self) -> None:
        self.copies: list[Tensor] = []
        self._tensors: list[Tensor] = []

    @torch.no_grad()
    def take(self, tensors: list[Tensor]) -> None:
        fits = [_kind(tensor) for tensor in tensors] == [_kind(copy) for copy in self.copies]
        self._tensors = tensors
        if fits and tensors:
            torch._foreach_copy_(self.copies, tensors)
        else:
            self.copies = []  # frees the old ones before new ones are taken
            self.copies = [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        if self._tensors:
            torch._foreach_copy_(self._tensors, self.copies)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
