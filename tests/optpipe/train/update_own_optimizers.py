"""Optimizers of a user's own, as `--optimizer` takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from optpipe.train import OptimizerConfig

Named = list[tuple[str, nn.Parameter]]


def two_rates(named: Named, settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Embeddings learn ten times as fast."""
    fast = [p for name, p in named if "byte" in name or "position" in name]
    slow = [p for _, p in named if all(p is not other for other in fast)]
    groups: list[dict[str, Any]] = [{"params": fast, "lr": 10 * settings.learning_rate}, {"params": slow}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=settings.learning_rate)


def lazy(named: Named, _settings: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named[1:]], lr=0.1)


def none(_named: Named, _settings: OptimizerConfig) -> None:
    return None


def broken(_named: Named, _settings: OptimizerConfig) -> torch.optim.Optimizer:
    raise ValueError("no optimizer today")
