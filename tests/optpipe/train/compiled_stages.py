"""Stages that torch.compile has taken, with compilers that count what they are given, or fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

WIDTH, ROWS = 8, 4

compiled: list[torch.fx.GraphModule] = []
"""Graphs that the compiler was given."""


def counted() -> Any:
    """Two stages whose compiler works."""
    return _built(_counting)


def failing() -> Any:
    """Two stages whose compiler fails on each of them."""
    return _built(_failing)


graphs = CompileCounterWithBackend("aot_eager")
"""Compiler of `blocks`."""


def blocks() -> Any:
    """Two stages of two blocks with dropout, compiled one by one."""
    torch._dynamo.reset()
    stages = [nn.Sequential(*(_Block() for _ in range(2))) for _ in range(2)]
    for block in (block for stage in stages for block in stage):
        block.compile(backend=graphs)
    return stages, torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), nn.functional.mse_loss


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x if torch.compiler.is_compiling() else x  # so that gradients tell whether the graph ran
        return x + self.narrow(nn.functional.dropout(torch.relu(self.wide(x)), 0.25))


def _counting(graph: torch.fx.GraphModule, _examples: Sequence[Tensor]) -> Callable[..., Any]:
    compiled.append(graph)
    return graph.forward


def _failing(_graph: torch.fx.GraphModule, _examples: Sequence[Tensor]) -> Callable[..., Any]:
    raise RuntimeError("no working C++ compiler")


def _built(backend: Callable[..., Any]) -> Any:
    torch._dynamo.reset()
    stages = [torch.compile(nn.Linear(WIDTH, WIDTH), backend=backend) for _ in range(2)]
    return stages, torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), nn.functional.mse_loss
