"""The optimizer of one stage, and what is done with it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from optpipe.train.config import OptimizerConfig


def stage_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """An optimizer of those parameters of a stage that are trainable; None where there are none.

    Of SGD, beta1 is the momentum.
    """
    parameters = [p for p in parameters if p.requires_grad]
    if not parameters:
        return None
    rate, decay = config.learning_rate, config.weight_decay
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=config.beta1, weight_decay=decay)
    return torch.optim.AdamW(parameters, lr=rate, betas=(config.beta1, config.beta2), weight_decay=decay)


def step_with(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """One step of the optimizer at this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
