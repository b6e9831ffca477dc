"""Layers whose backward is split give autograd's gradients, in two parts."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optpipe.errors import TrainingError
from optpipe.runtime.stage import Stage
from optpipe.runtime.weight_gradients import WeightGradients, defer_weight_gradients
from tests.optpipe.runtime.weight_gradients.layers import (
    F64,
    LAYERS,
    at_once,
    by_autograd,
    drawn,
    forward,
    only_input,
    weight_gradients,
    zero,
)
from tests.optpipe.runtime.weight_gradients.random_layers import DTYPES, RandomLayers, Using

Case = tuple[nn.Module, Tensor, WeightGradients]
EXACT = {"rtol": 1e-13, "atol": 1e-13}


def split(layer: nn.Module) -> tuple[nn.Module, WeightGradients]:
    """A copy of a layer that splits its backward."""
    module, pending = copy.deepcopy(layer), WeightGradients()
    defer_weight_gradients(module, pending)
    return module, pending


@pytest.fixture(params=LAYERS)
def case(request: pytest.FixtureRequest) -> Case:
    layer, x = LAYERS[request.param]
    module, pending = split(layer)
    return module, x, pending


def test_fused_they_give_the_gradients_of_autograd(case: Case) -> None:
    module, x, pending = case
    torch.testing.assert_close(at_once(module, x, pending), by_autograd(module, x), **EXACT)


def test_weight_gradients_wait_for_w(case: Case) -> None:
    module, x, pending = case
    input_gradient, expected = by_autograd(module, x)
    zero(module)
    torch.testing.assert_close(only_input(module, x, pending), input_gradient, **EXACT)
    assert not any(gradient.any() for gradient in weight_gradients(module))
    pending.compute(0)
    torch.testing.assert_close(weight_gradients(module), expected, **EXACT)


class _Input(nn.Module):
    """The input of a stage as a parameter, whose gradient is B's."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(x.clone()) if _has_gradient(x) else None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.x is None else x * self.x


def _has_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _weighted(y: Tensor, _target: Tensor) -> Tensor:
    y = torch.view_as_real(y) if y.is_complex() else y
    return (y * torch.arange(y.numel(), dtype=F64).sin().reshape(y.shape).to(y.dtype)).sum()


@pytest.mark.parametrize("seed", range(0, 400, 50))
def test_layers_at_random_have_the_gradients_of_autograd(seed: int) -> None:
    for number in range(seed, seed + 50):
        made = RandomLayers(number)
        layer, x = made.layer()
        assert_equals_autograd(nn.Sequential(_Input(x), layer), x, DTYPES[made.dtype], f"seed {number}")


def assert_equals_autograd(module: nn.Module, x: Tensor, most: float = 1e-11, text: str = "") -> None:
    """A stage of the module has the gradients of plain autograd, in B and W."""
    plain = copy.deepcopy(module)
    torch.autograd.backward(_weighted(plain(x), x))
    stage = Stage(module, first=True, loss=_weighted)
    stage.zero_gradients()
    stage.forward(0, x, x, offloads=False)
    stage.backward_input(0, None)
    stage.backward_weight(0)
    for (name, ours), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        largest = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        torch.testing.assert_close(ours.grad, wanted, rtol=most, atol=most * largest, msg=f"{text} {name}")


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("name", ["linear", "convolution 1d"])
def test_a_frozen_parameter_gets_no_gradient(name: str, frozen: str) -> None:
    layer, x = LAYERS[name]
    module, pending = split(layer)
    getattr(module, frozen).requires_grad_(False)
    torch.testing.assert_close(at_once(module, x, pending), by_autograd(module, x), **EXACT)
    assert getattr(module, frozen).grad is None


def test_a_frozen_layer_passes_gradients_on_and_leaves_nothing(case: Case) -> None:
    module, x, pending = case
    module.requires_grad_(False)
    if x.is_floating_point():
        torch.testing.assert_close(only_input(module, x, pending), by_autograd(module, x)[0], **EXACT)
        pending.compute(0)
    assert weight_gradients(module) == []


def test_microbatches_are_kept_apart() -> None:
    module, pending = split(nn.Linear(5, 3, dtype=F64))
    _, (once, _) = by_autograd(module, drawn(4, 5))
    zero(module)
    for microbatch, scale in ((0, 1.0), (1, 10.0)):
        only_input(module, scale * drawn(4, 5), pending, microbatch)
    pending.compute(1)
    torch.testing.assert_close(weight_gradients(module)[0], 10 * once, **EXACT)
    pending.compute(0)
    torch.testing.assert_close(weight_gradients(module)[0], 11 * once, **EXACT)


class Tied(nn.Module):
    """One weight three times: as an embedding, as a linear layer, and in a product that autograd alone sees."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        y: Tensor = self.head(self.embedding(index)) @ self.embedding.weight
        return y


def test_tied_weights_get_the_sum_of_their_gradients() -> None:
    module, pending = split(Tied().to(F64))
    index = torch.tensor([[1, 4, 1], [0, 4, 4]])
    torch.testing.assert_close(at_once(module, index, pending), by_autograd(module, index), **EXACT)
    expected = weight_gradients(module)
    zero(module)
    only_input(module, index, pending)
    assert weight_gradients(module)[0].any(), "the product's part comes in B"
    pending.compute(0)
    torch.testing.assert_close(weight_gradients(module), expected, **EXACT)


def test_a_layer_used_twice_leaves_two_parts() -> None:
    layer = nn.Linear(5, 5, dtype=F64)
    module, pending = split(nn.Sequential(layer, nn.Tanh(), layer))
    torch.testing.assert_close(at_once(module, drawn(4, 5), pending), by_autograd(module, drawn(4, 5)), **EXACT)


def test_what_waits_for_w_does_not_keep_the_graph() -> None:
    """The second layer keeps its input, which is the first one's output, for W; but not where that came from."""
    module, pending = split(nn.Sequential(nn.Linear(5, 5, dtype=F64), nn.Linear(5, 3, dtype=F64)))
    zero(module)
    gc.disable()
    try:
        _, y = forward(module, drawn(4, 5), pending)
        assert y.grad_fn is not None
        (first,) = (weakref.ref(node) for node, _ in y.grad_fn.next_functions if type(node) is type(y.grad_fn))
        with pending.backward_input(0):
            torch.autograd.backward(y, y.detach())
        assert first() is not None
        del y
        assert first() is None
    finally:
        gc.enable()
    pending.compute(0)
    assert all(gradient.any() for gradient in weight_gradients(module))


class _Penalty(nn.Module):
    """A forward that differentiates through its layer, once more when that is differentiated."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = self.layer(x).sin().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        (constant,) = torch.autograd.grad(y, x, retain_graph=True)
        return y + gradient.square().sum() + constant.sum()


class _FixedPoint(torch.autograd.Function):
    """A function whose backward differentiates twice through a graph of F, for the input and for the weights alone."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x, ctx.weights = x.detach().requires_grad_(), weights
            ctx.y = layer(ctx.x).sin()
        result: Tensor = ctx.y.detach()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (of_x,) = torch.autograd.grad(ctx.y, ctx.x, 2 * gradient, retain_graph=True)
        of_all = torch.autograd.grad(ctx.y, (ctx.x, *ctx.weights), gradient, allow_unused=True)
        return None, of_x + of_all[0], *of_all[1:]


class _Implicit(_Penalty):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _FixedPoint.apply(self.layer, x, *self.layer.parameters())  # type: ignore[no-untyped-call]
        return y


@pytest.mark.parametrize("kind", [_Penalty, _Implicit])
@pytest.mark.parametrize("name", [name for name, (_, x) in LAYERS.items() if x.is_floating_point()])
def test_modules_may_differentiate_through_layers(name: str, kind: type[_Penalty]) -> None:
    layer, x = LAYERS[name]
    module = nn.Sequential(_Input(x), kind(copy.deepcopy(layer), x))
    assert_equals_autograd(module, x)


@pytest.mark.parametrize("kind", [_Penalty, _Implicit])
def test_modules_may_differentiate_through_products(kind: type[_Penalty]) -> None:
    weight, bias, x = drawn(3, 5, 4), drawn(4), drawn(2, 5)
    for use in (
        lambda x, weight, bias: x @ weight[1] + bias,
        lambda x, weight, bias: nn.functional.linear(x, weight[0].T, bias),
        lambda x, weight, bias: x @ weight.mT.mT + bias,
    ):
        assert_equals_autograd(nn.Sequential(_Input(x), kind(Using(use, weight, bias), x)), x)


def test_what_autocast_has_cast_cannot_be_differentiated_within_f() -> None:
    stage = Stage(_Penalty(nn.Linear(5, 3), drawn(4, 5)), loss=_weighted, autocast=torch.bfloat16)
    with pytest.raises(TrainingError, match=r"differentiates through a Linear.*autocast.*Maybe"):
        stage.forward(0, torch.randn(4, 5), torch.zeros(()), offloads=False)


def test_bfloat16_weights_take_their_gradients_in_bfloat16() -> None:
    module, pending = split(nn.Linear(5, 3, dtype=torch.bfloat16))
    x = drawn(4, 5).bfloat16()
    torch.testing.assert_close(at_once(module, x, pending), by_autograd(module, x))
