"""Model of the update benchmark: stages whose ops sleep for their planned durations.

Asleep they take no core, so four processes on two cores keep to the plan, and what a step takes beyond its ops is what
processes wait for one another.
"""

from __future__ import annotations

from collections.abc import Collection
from time import sleep
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.problem import Problem
from optpipe.runtime import SplitBackward, register_deferred
from optpipe.runtime.loss import Loss
from optpipe.runtime.weight_gradients.split import Saved
from optpipe.train.lengths import Sizes
from optpipe.train.tasks.base import Batch

SECONDS_PER_US = 3e-3
"""Seconds of sleep per planned microsecond: an op of 10 us sleeps for 30 ms, far longer than the host's work."""
WIDTH = 128
"""Width at which weight gradients are split from their layer in BW too."""


class Sleeper(nn.Module):
    """Autograd function of ``x * weight`` that sleeps."""

    def __init__(self, problem: Problem, stage: int) -> None:
        super().__init__()
        costs = problem.stages[stage]
        self.forward_s = costs.forward_us * SECONDS_PER_US
        self.input_s = costs.backward_input_us * SECONDS_PER_US
        self.weight_s = costs.backward_weight_us * SECONDS_PER_US
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Forward outside a pipeline."""
        return x * self.weight


class SplitSleeper(SplitBackward[Sleeper]):
    """Split backward whose halves sleep for their times."""

    def forward(self, layer: Sleeper, x: Tensor) -> tuple[Tensor, Saved]:
        """Sleep for F."""
        sleep(layer.forward_s)
        return x * layer.weight, (x,)

    def input_gradient(self, layer: Sleeper, _saved: Saved, gradient: Tensor) -> Tensor:
        """Sleep for B."""
        sleep(layer.input_s)
        return gradient * layer.weight

    def add_weight_gradients(self, layer: Sleeper, saved: Saved, gradient: Tensor) -> None:
        """Sleep for W."""
        sleep(layer.weight_s)
        if layer.weight.grad is not None:
            layer.weight.grad.add_(gradient * saved[0])


register_deferred(Sleeper, SplitSleeper())


class Begin(nn.Module):
    """Module that gives the batch a gradient, so that the first stage has a B like all others."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the batch by 1."""
        return x * self.factor


class SleepyTask:
    """Task with one sleeping layer per stage; the loss is the mean of the squares."""

    name = "asleep"
    tokens = WIDTH
    reference = Sizes(WIDTH * WIDTH, WIDTH)
    loader = None
    architecture = None

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    @property
    def loss(self) -> Loss:
        """Norm limit far above any norm of this task."""
        return nn.functional.mse_loss

    def build_stages(self, _own: Collection[int] | None = None) -> list[nn.Module]:
        """Build the stages; the first one makes a gradient for the batch."""
        sleepers: list[nn.Module] = [Sleeper(self._problem, s) for s in range(len(self._problem.stages))]
        return [nn.Sequential(Begin(), sleepers[0]), *sleepers[1:]]

    def batch(self, step: int) -> Batch:
        """Return the same batch for every step."""
        del step
        ones = [torch.ones(WIDTH, WIDTH) for _ in range(self._problem.microbatches)]
        return ones, [2 * x for x in ones]

    def model_name(self, stage: int, name: str) -> str:
        """Name in a sequence of the stages."""
        return f"{stage}.{name}"

    def identity(self) -> dict[str, Any]:
        """Number of microbatches of the problem."""
        return {"name": self.name, "problem": self._problem.to_data()}
