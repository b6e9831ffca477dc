"""Stages that torch.compile has taken, with compilers that count what they are given, or fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, ROWS = 8, 4

compiled: list[torch.fx.GraphModule] = []
"""What the compiler was given."""


def counted() -> Any:
    """Two stages whose compiler works."""
    return _built(_counting)


def failing() -> Any:
    """Two stages whose compiler fails on each of them."""
    return _built(_failing)


def _counting(graph: torch.fx.GraphModule, _examples: Sequence[Tensor]) -> Callable[..., Any]:
    compiled.append(graph)
    return graph.forward


def _failing(_graph: torch.fx.GraphModule, _examples: Sequence[Tensor]) -> Callable[..., Any]:
    raise RuntimeError("no working C++ compiler")


def _built(backend: Callable[..., Any]) -> Any:
    torch._dynamo.reset()
    stages = [torch.compile(nn.Linear(WIDTH, WIDTH), backend=backend) for _ in range(2)]
    return stages, torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), nn.functional.mse_loss
