"""One layer of every kind and setting that splits its backward, with an input; and how to run it in halves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from optpipe.runtime.weight_gradients import WeightGradients

F64 = torch.float64


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


INDEX = torch.tensor([[1, 4, 1], [0, 4, 4]])

LAYERS = {
    "linear": (nn.Linear(5, 3), drawn(2, 4, 5)),
    "linear without bias": (nn.Linear(5, 3, bias=False), drawn(4, 5)),
    "linear on one row": (nn.Linear(5, 3), drawn(5)),
    "linear on a transposed input": (nn.Linear(5, 3), drawn(2, 5, 4).transpose(1, 2)),
    "embedding": (nn.Embedding(6, 3), INDEX),
    "embedding with padding": (nn.Embedding(6, 3, padding_idx=4), INDEX),
    "convolution 1d": (nn.Conv1d(4, 6, 3), drawn(2, 4, 7)),
    "convolution 2d, grouped, strided": (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), drawn(2, 4, 7, 7)),
    "convolution 2d, depthwise, dilated": (nn.Conv2d(4, 4, 3, dilation=2, groups=4, bias=False), drawn(2, 4, 7, 7)),
    "convolution 2d of one image": (nn.Conv2d(4, 6, 3), drawn(4, 7, 7)),
    "convolution 3d": (nn.Conv3d(2, 3, 2), drawn(2, 2, 4, 4, 4)),
    "convolution 1d, transposed": (nn.ConvTranspose1d(4, 6, 3), drawn(2, 4, 7)),
    "convolution 2d, transposed": (
        nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2),
        drawn(2, 4, 5, 5),
    ),
    "convolution 3d, transposed": (nn.ConvTranspose3d(2, 3, 2, bias=False), drawn(2, 2, 3, 3, 3)),
}
for layer, _ in LAYERS.values():
    layer.to(F64)

Gradients = tuple[Tensor | None, list[Tensor]]
"""Gradients of the input, and of all parameters that are not frozen."""


def zero(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def weight_gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def output_gradient(y: Tensor) -> Tensor:
    """Weighs every output differently."""
    return torch.arange(y.numel(), dtype=F64).reshape(y.shape).sin().to(y.dtype)


def by_autograd(module: nn.Module, x: Tensor) -> Gradients:
    """Outside of a stage layers are what they were."""
    zero(module)
    x = x.clone().requires_grad_(x.is_floating_point())
    y = module(x)
    torch.autograd.backward(y, output_gradient(y))
    return x.grad, weight_gradients(module)


def forward(module: nn.Module, x: Tensor, pending: WeightGradients) -> tuple[Tensor, Tensor]:
    """F: the input as a leaf, and the output."""
    x = x.clone().requires_grad_(x.is_floating_point())
    with pending.forward():
        return x, module(x)


def at_once(module: nn.Module, x: Tensor, pending: WeightGradients) -> Gradients:
    """F and BW."""
    zero(module)
    x, y = forward(module, x, pending)
    with pending.backward():
        torch.autograd.backward(y, output_gradient(y))
    return x.grad, weight_gradients(module)


def only_input(module: nn.Module, x: Tensor, pending: WeightGradients, microbatch: int = 0) -> Tensor | None:
    """F and B."""
    x, y = forward(module, x, pending)
    with pending.backward_input(microbatch):
        torch.autograd.backward(y, output_gradient(y))
    return x.grad
