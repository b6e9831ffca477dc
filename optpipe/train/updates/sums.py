"""The one exchange of a step: losses, squared gradient norms and wishes as one float64 vector, summed over processes.

Every number has a place of its own, to which all other processes add 0: the sum has the same bits in any number of
processes. What is not finite stays so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepSums:
    """What all processes know of a step. `loss`: mean over the whole batch. `wishes`: how many processes ask for
    each.
    """

    loss: float
    gradient_norm: float
    wishes: tuple[int, ...]

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


@dataclass(frozen=True)
class SumsLayout:
    """Where each number is, for `replicas` pipelines of `stages` stages and `microbatches` each."""

    microbatches: int
    replicas: int
    stages: int
    replica: int

    def pack(self, losses: Tensor, squares: Mapping[int, Tensor], wishes: Sequence[bool]) -> Tensor:
        """This process's part. `losses`, shape (microbatches,), are zeros where another process has them; `squares` are
        those of its stages: gradients are equal in all replicas, and the first tells.
        """
        batch = self.microbatches * self.replicas
        packed = losses.new_zeros(batch + self.stages + len(wishes), dtype=torch.float64)
        packed[self.replica * self.microbatches : (self.replica + 1) * self.microbatches] = losses
        if self.replica == 0:
            for stage, square in squares.items():
                packed[batch + stage] = square
        if any(wishes):
            packed[batch + self.stages :] = torch.tensor(wishes, dtype=torch.float64)
        return packed

    def unpack(self, packed: Tensor) -> StepSums:
        """The sum of all parts, on the CPU."""
        batch = self.microbatches * self.replicas
        values = packed.tolist()
        loss = float(packed[:batch].mean())
        square = sum(values[batch : batch + self.stages])
        return StepSums(loss, math.sqrt(square), tuple(map(int, values[batch + self.stages :])))
