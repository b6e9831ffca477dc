"""Rollback of optimistic steps: exact snapshots, and back-off when rollbacks are frequent.

No optimizer is inverted: everything is copied before the step and comes back bit for bit. The copies stay allocated:
they take the parameters once, what the optimizer keeps (for AdamW twice as much again), and the buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Snapshot:
    """Of the modules and optimizers of one process."""

    def __init__(self, modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._modules, self._optimizers = list(modules), list(optimizers)
        self._states: list[_State] = []
        self._buffers: list[_Buffer] = []
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []

    @property
    def size_bytes(self) -> int:
        """Memory that the copies take."""
        return sum(copy.nbytes for copy in self._copies)

    @torch.no_grad()
    def take(self) -> None:
        """Remember everything as it is now, in the memory of the last time."""
        self._states = [
            _State(optimizer, parameter, dict(optimizer.state.get(parameter, {})))
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        parts = [part for module in self._modules for part in module.modules()]
        self._buffers = [_Buffer(p, name, b) for p in parts for name, b in p._buffers.items() if b is not None]
        self._tensors = [tensor for state in self._states for tensor in state.tensors()]
        # All of them: a batch norm changes its statistics without telling autograd's count of versions.
        self._tensors += [buffer.tensor for buffer in self._buffers]
        if [_kind(tensor) for tensor in self._tensors] == [_kind(copy) for copy in self._copies]:
            _copy(self._copies, self._tensors)
        else:
            self._copies = []  # frees the old ones before new ones are taken
            self._copies = [tensor.detach().clone() for tensor in self._tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Bring everything back as it was; nothing if it was never taken."""
        for state in self._states:
            state.put_back()
        for buffer in self._buffers:
            buffer.put_back()
        _copy(self._tensors, self._copies)


@dataclass(frozen=True)
class _State:
    """A parameter and what its optimizer kept of it, which is nothing before the first step."""

    optimizer: torch.optim.Optimizer
    parameter: Tensor
    kept: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        return [self.parameter, *(value for value in self.kept.values() if isinstance(value, Tensor))]

    def put_back(self) -> None:
        """The same tensors under the same names; what they hold is copied apart."""
        if self.kept:
            self.optimizer.state[self.parameter] = self.kept
        else:
            self.optimizer.state.pop(self.parameter, None)


@dataclass(frozen=True)
class _Buffer:
    """A buffer of a module, which a forward may change in place or replace."""

    module: nn.Module
    name: str
    tensor: Tensor

    def put_back(self) -> None:
        """The same tensor; what it holds is copied apart."""
        self.module._buffers[self.name] = self.tensor


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if values:
        torch._foreach_copy_(to, values)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


BACKOFF_WINDOW = 16
"""Steps that are looked back on."""

MOST_ROLLBACKS = 4
"""Of these; with more, the next update waits. A step that is undone was measured to lose two to three times what one
without a barrier saves (`python -m benchmarks.updates updates`), so they are even at about a third of wrong steps."""


class RollbackBackoff:
    """Says when to wait for all processes: after many steps that were, or would have been, rolled back.

    It goes by outcomes alone, which are the same in every process, so all of them wait together. While it waits,
    outcomes still tell which updates would have been wrong, so it also sees when to begin again.
    """

    def __init__(self) -> None:
        self._wrong: deque[bool] = deque(maxlen=BACKOFF_WINDOW)

    def add(self, *, wrong: bool) -> None:
        """One more step whose outcome is known."""
        self._wrong.append(wrong)

    @property
    def waits(self) -> bool:
        """Whether the next update should wait for its sums."""
        return sum(self._wrong) > MOST_ROLLBACKS
