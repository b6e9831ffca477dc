"""Layers whose backward is split give autograd's gradients, in two parts."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from optpipe.errors import TrainingError
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


def test_a_gradient_of_a_gradient_is_refused() -> None:
    module, pending = split(nn.Linear(5, 3, dtype=F64))
    x, y = forward(module, drawn(4, 5), pending)
    with pending.backward(), pytest.raises(TrainingError, match="a gradient of a gradient"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_backward_within_f_is_refused() -> None:
    module, pending = split(nn.Linear(5, 3, dtype=F64))
    x, y = forward(module, drawn(4, 5), pending)
    with pending.forward(), pytest.raises(TrainingError, match=r"asked for within F.*Maybe"):
        torch.autograd.grad(y.sum(), x)


def test_bfloat16_weights_take_their_gradients_in_bfloat16() -> None:
    module, pending = split(nn.Linear(5, 3, dtype=torch.bfloat16))
    x = drawn(4, 5).bfloat16()
    torch.testing.assert_close(at_once(module, x, pending), by_autograd(module, x))
