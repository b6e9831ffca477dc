"""The plain step: the same model on the same batch with ordinary autograd, no pipeline. What a schedule must equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from optpipe.runtime.messages import Tree, leaves
from optpipe.runtime.stage import Loss

Drawing = Callable[[int, int], AbstractContextManager[None]]
"""Within it, torch draws the random numbers of a stage and a microbatch, in this order, both by their number."""


def _as_it_comes(_stage: int, _microbatch: int) -> AbstractContextManager[None]:
    return nullcontext()


def plain_step(
    modules: Sequence[nn.Module],
    loss: Loss,
    inputs: Sequence[Tree],
    targets: Sequence[Tree],
    autocast: torch.dtype | None = None,
    drawing: Drawing = _as_it_comes,
) -> float:
    """Set `.grad` of all parameters to the gradient of the mean loss over the microbatches; returns that loss.

    Parameters that are frozen, or that the loss does not depend on, have none. The loss draws as the last module does.
    """
    for module in modules:
        module.zero_grad()
    total = 0.0
    last = len(modules) - 1
    for i, (x, target) in enumerate(zip(inputs, targets, strict=True)):
        with torch.autocast(leaves(x)[0].device.type, autocast) if autocast else nullcontext():
            for s, module in enumerate(modules):
                with drawing(s, i):
                    x = loss(module(x), target) if s == last else module(x)
        value = x / len(inputs)
        if value.requires_grad:
            torch.autograd.backward(value)
        total += value.item()
    return total


def gradient_error(gradient: Tensor, plain: Tensor) -> float:
    """max|g - g_plain| / max|g_plain|.

    0 where both gradients are 0; infinity where only the plain one is, and where anything is not a number.
    """
    return relative_error(float((gradient - plain).abs().max()), float(plain.abs().max()))


def relative_error(difference: float, scale: float) -> float:
    """difference / scale; 0 where there is no difference, infinity where the scale is 0 or the error not a number."""
    if difference == 0.0:
        return 0.0
    error = difference / scale if scale else math.inf
    return math.inf if math.isnan(error) else error
