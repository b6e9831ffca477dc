"""Rollback of optimistic steps: exact snapshots, and back-off when rollbacks are frequent.

Zero Bubble inverts AdamW's step in place, which restores weights up to rounding. Here everything is copied before the
step and restored bit for bit: a run has the same numbers with and without post-validation, by any optimizer. The copies
stay allocated: the parameters once, the optimizer state (for AdamW twice the parameters), and the buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Snapshot:
    """Snapshot of the parameters, optimizer state and buffers of one process."""

    def __init__(self, modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._modules, self._optimizers = list(modules), list(optimizers)
        self._states: list[_State] = []
        self._buffers: list[_Buffer] = []
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []

    @property
    def size_bytes(self) -> int:
        """Memory of the copies."""
        return sum(copy.nbytes for copy in self._copies)

    @torch.no_grad()
    def take(self) -> None:
        """Copy the present state, into the memory of the last snapshot if shapes are the same."""
        self._states = [
            _State(optimizer, parameter, dict(optimizer.state.get(parameter, {})))
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        parts = [part for module in self._modules for part in module.modules()]
        self._buffers = [_Buffer(p, name, b) for p in parts for name, b in p._buffers.items() if b is not None]
        self._tensors = [tensor for state in self._states for tensor in state.tensors()]
        # Every buffer, because its version counter does not show a change: batch norm's kernel bypasses it.
        self._tensors += [buffer.tensor for buffer in self._buffers]
        if [_kind(tensor) for tensor in self._tensors] == [_kind(copy) for copy in self._copies]:
            _copy(self._copies, self._tensors)
        else:
            self._copies = []  # frees the old ones before new ones are taken
            self._copies = [tensor.detach().clone() for tensor in self._tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state of the last `take`; does nothing if there was none."""
        for state in self._states:
            state.put_back()
        for buffer in self._buffers:
            buffer.put_back()
        _copy(self._tensors, self._copies)


@dataclass(frozen=True)
class _State:
    """A parameter and its optimizer state, which is empty before the first step."""

    optimizer: torch.optim.Optimizer
    parameter: Tensor
    kept: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        return [self.parameter, *(value for value in self.kept.values() if isinstance(value, Tensor))]

    def put_back(self) -> None:
        """Restore which tensors the state consists of; `Snapshot.restore` copies their values."""
        if self.kept:
            self.optimizer.state[self.parameter] = self.kept
        else:
            self.optimizer.state.pop(self.parameter, None)


@dataclass(frozen=True)
class _Buffer:
    """A buffer of a module. A forward may change it in place or replace the tensor."""

    module: nn.Module
    name: str
    tensor: Tensor

    def put_back(self) -> None:
        """Restore the tensor itself; `Snapshot.restore` copies its values."""
        self.module._buffers[self.name] = self.tensor


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if values:
        torch._foreach_copy_(to, values)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


BACKOFF_WINDOW = 16
"""Number of latest steps that decide."""

MOST_ROLLBACKS = 4
"""Rollbacks in the window beyond which updates wait. A rollback was measured to cost two to three times what a step
without a barrier saves (`python -m benchmarks.updates updates`): the two break even at about a third of all steps."""


class RollbackBackoff:
    """Back-off of optimistic updates after many steps that were, or would have been, rolled back.

    Outcomes are equal in every process, so all of them change over in the same step without an exchange; a process that
    waited alone would expect other messages than its neighbours send. While updates wait, outcomes still show which of
    them would have been rolled back, so the back-off ends when clipping becomes rare again.
    """

    def __init__(self) -> None:
        self._wrong: deque[bool] = deque(maxlen=BACKOFF_WINDOW)

    def add(self, *, wrong: bool) -> None:
        """Count a step whose outcome is known."""
        self._wrong.append(wrong)

    @property
    def waits(self) -> bool:
        """True if the next update should wait for its sums."""
        return sum(self._wrong) > MOST_ROLLBACKS
