"""Small chains of layers to run schedules on, and what the plain step makes of them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from optpipe.runtime import MessageSpec, Part, Stage

WIDTHS = (6, 10, 4, 8, 5, 7)
"""Widths of the messages between stages: boundaries need not be equal."""
M = 3


class Fragile(nn.Module):
    """Passes its input on, but raises at the call of a given number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls_left = -1

    def forward(self, x: Tensor) -> Tensor:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise ValueError("the layer broke")
        return x


class InParts(nn.Sequential):
    """Layers as parts of which every second one exchanges, and the passes of them that began, by name."""

    def __init__(self, name: str, begun: list[str], *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.name, self.begun = name, begun

    def block_parts(self) -> list[Part]:
        return [Part(partial(self._run, k), exchanges=k % 2 == 1) for k in range(len(self))]

    def _run(self, k: int, x: Tensor) -> Tensor:
        self.begun.append(f"F{self.name}.{k}")
        output: Tensor = self[k](x)
        output.register_hook(lambda _: self.begun.append(f"B{self.name}.{k}"))
        return output


def chain(stages: int, dtype: torch.dtype = torch.float32, *, frozen: Collection[int] = ()) -> list[nn.Module]:
    """One module a stage, always with the same weights; the last layer of each is Fragile."""
    torch.manual_seed(0)
    widths = WIDTHS[: stages + 1]
    modules = [nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU(), Fragile()) for a, b in pairwise(widths)]
    return [module.to(dtype).requires_grad_(s not in frozen) for s, module in enumerate(modules)]


def batch(stages: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets of M microbatches of two rows."""
    torch.manual_seed(1)
    inputs = [torch.randn(2, WIDTHS[0], dtype=dtype) for _ in range(M)]
    return inputs, [torch.randn(2, WIDTHS[stages], dtype=dtype) for _ in range(M)]


def specs(stages: int, dtype: torch.dtype = torch.float32) -> list[MessageSpec]:
    """Specs of the messages that cross the boundaries."""
    return [MessageSpec((2, width), dtype) for width in WIDTHS[1:stages]]


def stages_of(modules: Sequence[nn.Module], *, gradient_scale: float = 1 / M) -> dict[int, Stage]:
    """A stage for each module, with the mean squared error at the end."""
    last = len(modules) - 1
    loss = nn.functional.mse_loss
    return {
        s: Stage(module, first=s == 0, loss=loss if s == last else None, gradient_scale=gradient_scale)
        for s, module in enumerate(modules)
    }


def plain_gradients(modules: Sequence[nn.Module], inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the mean loss over the microbatches, by ordinary autograd."""
    model = nn.Sequential(*copy.deepcopy(list(modules)))
    losses = [nn.functional.mse_loss(model(x), y) for x, y in zip(inputs, targets, strict=True)]
    torch.autograd.backward(torch.stack(losses).mean())
    return [p.grad for p in model.parameters() if p.grad is not None]


def gradients(modules: Sequence[nn.Module]) -> list[Tensor]:
    """A copy of what `.grad` holds."""
    return [p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None]
