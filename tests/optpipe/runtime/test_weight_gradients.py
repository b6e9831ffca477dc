"""Layers whose backward is split give autograd's gradients, in two parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from optpipe.errors import TrainingError
from optpipe.runtime.weight_gradients import WeightGradients, defer_weight_gradients

F64 = torch.float64


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(1))


def embedded(layer: nn.Embedding) -> tuple[nn.Module, Tensor]:
    return layer, torch.tensor([[1, 4, 1], [0, 4, 4]])


LAYERS = {
    "linear": (nn.Linear(5, 3, dtype=F64), drawn(2, 4, 5)),
    "linear without bias": (nn.Linear(5, 3, bias=False, dtype=F64), drawn(4, 5)),
    "linear on a transposed input": (nn.Linear(5, 3, dtype=F64), drawn(2, 5, 4).transpose(1, 2)),
    "layer norm": (nn.LayerNorm(5, dtype=F64), drawn(2, 4, 5)),
    "layer norm over two dimensions": (nn.LayerNorm((4, 5), dtype=F64), drawn(2, 4, 5)),
    "layer norm without bias": (nn.LayerNorm(5, bias=False, dtype=F64), drawn(2, 4, 5)),
    "embedding": embedded(nn.Embedding(6, 3, dtype=F64)),
}


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    return LAYERS[request.param]


def gradients(module: nn.Module, x: Tensor) -> tuple[Tensor | None, list[Tensor]]:
    """Input gradient and weight gradients of a loss that weighs every output differently."""
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = x.clone().requires_grad_(x.is_floating_point())
    y = module(x)
    y.backward(torch.arange(y.numel(), dtype=F64).reshape(y.shape).sin())
    return x.grad, [p.grad.clone() for p in module.parameters() if p.grad is not None]


def test_gradients_are_those_of_autograd(layer: tuple[nn.Module, Tensor]) -> None:
    module, x = layer
    plain_input, plain_weights = gradients(module, x)
    split = defer_weight_gradients(module, WeightGradients())
    assert split is not module
    split_input, split_weights = gradients(split, x)
    if plain_input is not None:
        assert split_input is not None
        torch.testing.assert_close(split_input, plain_input, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(split_weights, plain_weights, rtol=1e-14, atol=1e-14)


def test_weight_gradients_wait_for_w(layer: tuple[nn.Module, Tensor]) -> None:
    module, x = layer
    sink = WeightGradients()
    split = defer_weight_gradients(module, sink)
    _, at_once = gradients(split, x)
    with sink.kept_for(3):
        _, after_b = gradients(split, x)
    assert not any(gradient.any() for gradient in after_b)
    sink.compute(3)
    assert all(torch.equal(p.grad, g) for p, g in zip(split.parameters(), at_once, strict=True) if p.grad is not None)


def test_microbatches_are_kept_apart() -> None:
    module, x = nn.Linear(5, 3, dtype=F64), drawn(4, 5)
    sink = WeightGradients()
    split = defer_weight_gradients(module, sink)
    _, (once, _) = gradients(split, x)
    for microbatch, scale in ((0, 1.0), (1, 10.0)):
        with sink.kept_for(microbatch):
            gradients(split, scale * x)
    sink.compute(1)
    assert module.weight.grad is not None
    torch.testing.assert_close(module.weight.grad, 10 * once)
    sink.compute(0)
    torch.testing.assert_close(module.weight.grad, 11 * once)


def test_layers_within_a_module_are_replaced_with_the_same_parameters_and_names() -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.GELU(), nn.LayerNorm(5)))
    before = dict(module.named_parameters())
    split = defer_weight_gradients(module, WeightGradients())
    assert {name: id(p) for name, p in split.named_parameters()} == {name: id(p) for name, p in before.items()}


def test_an_embedding_with_padding_is_left_to_autograd() -> None:
    module = nn.Embedding(6, 3, padding_idx=1)
    assert defer_weight_gradients(module, WeightGradients()) is module


def test_frozen_weights_get_no_gradient() -> None:
    module, x = nn.Linear(5, 3, dtype=F64), drawn(4, 5)
    module.weight.requires_grad_(False)
    split = defer_weight_gradients(module, WeightGradients())
    _, (weight, bias) = gradients(split, x)
    assert not weight.any()
    assert bias.all()


def test_a_compiled_module_is_refused() -> None:
    inner = nn.Linear(5, 3)
    compiled = nn.ModuleList([inner])
    compiled[0] = torch.compile(inner, backend="eager")  # type: ignore[assignment]
    with pytest.raises(TrainingError, match=r"Linear is compiled.*Maybe hand over the module before torch\.compile"):
        defer_weight_gradients(compiled, WeightGradients())
