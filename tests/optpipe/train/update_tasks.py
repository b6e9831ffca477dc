"""The GPT as tests of updates want it: with dropout, running statistics, and batches without a loss."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.train.config import TrainingConfig
from optpipe.train.tasks.base import Batch
from optpipe.train.tasks.gpt import GPTTask


class Averaging(nn.Module):
    """Adds a running mean of its input, which every forward moves: in place and by a new tensor."""

    mean: Tensor
    calls: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=dtype))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(), 0.1)
            self.calls = self.calls + 1
        return x + self.mean.clone()


class NoisyTask(GPTTask):
    """Every stage but the last ends with dropout and a running mean; the steps of `without_loss` have a loss of NaN."""

    def __init__(self, config: TrainingConfig, stages: int, microbatches: int, without_loss: Collection[int]) -> None:
        super().__init__(config, stages, microbatches)
        self._dtype, self._without_loss = config.model.torch_dtype, without_loss

    def build_stages(self, _own: object = None) -> list[nn.Module]:
        stages = super().build_stages()
        return [nn.Sequential(s, nn.Dropout(0.1), Averaging(self._dtype)) for s in stages[:-1]] + stages[-1:]

    def batch(self, step: int) -> Batch:
        """The mean loss over no target at all is 0 / 0."""
        inputs, targets = super().batch(step)
        if step in self._without_loss:
            targets = [*targets[:-1], torch.full_like(targets[-1], -100)]
        return inputs, targets

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"noisy": True}
