"""The plain step: the same model on the same batch with ordinary autograd, no pipeline. What a schedule must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from optpipe.runtime.gradient_sync import TiedWeights
from optpipe.runtime.messages import Tree, leaves
from optpipe.runtime.stage import Loss


def plain_step(
    modules: Sequence[nn.Module],
    loss: Loss,
    inputs: Sequence[Tree],
    targets: Sequence[Tree],
    autocast: torch.dtype | None = None,
) -> float:
    """Set `.grad` of all parameters to the gradient of the mean loss over the microbatches; returns that loss."""
    for module in modules:
        module.zero_grad()
    total = 0.0
    for x, target in zip(inputs, targets, strict=True):
        with torch.autocast(leaves(x)[0].device.type, autocast) if autocast else nullcontext():
            for module in modules:
                x = module(x)
            value = loss(x, target) / len(inputs)
        torch.autograd.backward(value)
        total += value.item()
    return total


def tie_parameters(modules: Sequence[nn.Module], tie: TiedWeights) -> None:
    """Let the last of two tied parameters be the first: one tensor, one `.grad`."""
    (first, first_name), (last, last_name) = tie.first, tie.last
    parent, _, name = last_name.rpartition(".")
    setattr(modules[last].get_submodule(parent), name, modules[first].get_parameter(first_name))


def gradient_error(gradient: Tensor, plain: Tensor) -> float:
    """max|g - g_plain| / max|g_plain|.

    0 where both gradients are 0; infinity where only the plain one is, and where anything is not a number.
    """
    difference, scale = float((gradient - plain).abs().max()), float(plain.abs().max())
    if difference == 0.0:
        return 0.0
    error = difference / scale if scale else math.inf
    return math.inf if math.isnan(error) else error
