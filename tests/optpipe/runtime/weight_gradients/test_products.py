"""Layers of kinds without a split of their own: products with their matrices wait for W, all else is autograd's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3MoeConfig
from transformers.pytorch_utils import Conv1D

from optpipe.runtime.stage import Stage
from optpipe.runtime.weight_gradients import undeferred_layers

WIDTH, ROWS, EXPERTS = 8, 4, 3
Uses = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A use of x (rows, width), a matrix (width, width) and three of them (experts, width, width)."""

PRODUCTS: dict[str, Uses] = {
    "linear": lambda x, one, _: nn.functional.linear(x, one),
    "linear by name": lambda x, one, _: nn.functional.linear(input=x, weight=one, bias=x.new_ones(WIDTH)),
    "linear of a batch": lambda x, one, _: nn.functional.linear(x.reshape(2, -1, WIDTH), one).flatten(0, 1),
    "matmul": lambda x, one, _: x @ one,
    "transposed": lambda x, one, _: torch.mm(x, one.T) + x @ one.t() + x @ one.transpose(1, 0) + x @ one.mT,
    "twice": lambda x, one, _: (x @ one).tanh() @ one,
    "addmm": lambda x, one, _: torch.addmm(x.new_ones(WIDTH), x, one),
    "looked up": lambda x, one, _: nn.functional.embedding(torch.tensor([1, 0, 1, 7]), one) + 0 * x,
    "looked up, padded": lambda x, one, _: nn.functional.embedding(torch.tensor([1, 0, 1, 7]), one, 1) * x,
    "entries": lambda x, _, three: nn.functional.linear(x, three[0]) + x @ three[torch.tensor(2)].T,
    "gathered": lambda x, _, three: torch.bmm(three[torch.tensor([0, 2, 2, 0])], x.unsqueeze(-1)).squeeze(-1),
    "gathered, on the left": lambda x, _, three: torch.bmm(x.unsqueeze(1), three[torch.tensor([1, 1, 2, 0])]).squeeze(
        1
    ),
    "all": lambda x, _, three: (x.expand(EXPERTS, -1, -1) @ three.transpose(1, 2)).sum(0),
    "grouped": lambda x, _, three: nn.functional.grouped_mm(x, three, offs=torch.tensor([1, 1, 4], dtype=torch.int32)),
    "grouped, transposed": lambda x, _, three: nn.functional.grouped_mm(
        x, three.transpose(-2, -1), offs=torch.tensor([2, 3, 4], dtype=torch.int32)
    ),
}
OTHERS: dict[str, Uses] = {
    "scaled": lambda x, one, _: x @ (2 * one),
    "in einsum": lambda x, one, _: torch.einsum("ni,io->no", x, one),
    "on the left of rows": lambda x, one, _: (one @ x.T).T,
    "added": lambda x, one, _: x + one[:ROWS],
    "of both": lambda x, one, _: x @ (one @ one),
    "looked up and changed": lambda x, one, _: (
        nn.functional.embedding(torch.tensor([1, 0, 1, 7]), one, sparse=False)
        * nn.functional.embedding(torch.tensor([1, 0, 1, 7]), one, scale_grad_by_freq=True)
    ),
    "a part of an entry": lambda x, _, three: x @ three[0, :, :],
    "some uses": lambda x, one, _: x @ one + one.sum(),
}


class Layer(nn.Module):
    def __init__(self, uses: Uses, width: int = WIDTH) -> None:
        super().__init__()
        self.uses = uses
        draw = torch.Generator().manual_seed(0)
        self.one = nn.Parameter(torch.randn(width, width, generator=draw))
        self.three = nn.Parameter(torch.randn(EXPERTS, width, width, generator=draw))
        self.bias = nn.Parameter(torch.randn(width, generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        return self.uses(x, self.one, self.three) + self.bias


def _loss(output: Any, _target: Any) -> Tensor:
    loss: Tensor = (output if isinstance(output, Tensor) else output.logits).float().sin().mean()
    return loss


Found = tuple[dict[str, Tensor], set[str]]
"""Gradients, and the matrices that had one after B."""


def in_a_stage(module: nn.Module, x: Tensor, autocast: torch.dtype | None = None) -> Found:
    stage = Stage(module, first=True, loss=_loss, autocast=autocast)
    stage.zero_gradients()
    stage.forward(0, x, x, offloads=False)
    stage.backward_input(0, None)
    early = {n for n, p in module.named_parameters() if p.grad is not None and p.grad.any() and p.dim() > 1}
    stage.backward_weight(0)
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}, early


def expected(module: nn.Module, x: Tensor, autocast: torch.dtype | None = None) -> dict[str, Tensor]:
    module = copy.deepcopy(module)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        torch.autograd.backward(_loss(module(x), x))
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in module.named_parameters()}


def drawn() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_wait_for_w(name: str, autocast: torch.dtype | None) -> None:
    layer, x = Layer(PRODUCTS[name]), drawn()
    if autocast and name.startswith("grouped"):
        layer, x = layer.bfloat16(), x.bfloat16()  # which autocast leaves alone
    wanted = expected(layer, x, autocast)
    found, early = in_a_stage(layer, x, autocast)
    assert early == set()
    for key, gradient in found.items():
        torch.testing.assert_close(
            gradient, wanted[key], rtol=2e-2 if autocast else 1e-6, atol=1e-2 if autocast else 1e-7
        )
    used = "one" if wanted["one"].any() else "three"
    assert [p is getattr(layer, used) for p in layer.left()] == [False], "the other one was not used"


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_product_is_autograds_and_is_named(name: str) -> None:
    layer, x = Layer(OTHERS[name]), drawn()
    wanted = expected(layer, x)
    found, early = in_a_stage(layer, x)
    assert early
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-6, atol=1e-7)
    assert undeferred_layers(nn.Sequential(layer)) == {"Layer": {"0": layer}}


def test_a_checkpoint_runs_it_again() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(PRODUCTS["twice"])

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.layer, x, use_reentrant=False)
            return y

    module, x = Checkpointed(), drawn()
    wanted = expected(module, x)
    found, early = in_a_stage(module, x)
    assert early == set()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-6, atol=1e-7)


def test_copies_and_evaluation_are_plain() -> None:
    layer, x = Layer(PRODUCTS["matmul"]), drawn()
    before = layer(x)
    Stage(layer)
    assert type(layer) is not Layer
    assert type(copy.deepcopy(layer)) is Layer
    assert torch.equal(layer(x), before)
    torch.autograd.backward(layer(x).sum())
    assert layer.one.grad is not None, "outside of a stage"


@pytest.mark.parametrize("way", ["eager", "batched_mm", "grouped_mm"])
def test_experts_and_routers_of_transformers(way: str) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "use_cache": False}
    config = Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2, initializer_range=0.2)
    config._experts_implementation = way
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM(config)
    x = torch.arange(16).reshape(2, 8)
    wanted = expected(model, x)
    found, early = in_a_stage(model, x)
    assert early == set()
    assert undeferred_layers(model) == {}
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-5, atol=1e-7)


class Adapted(nn.Module):
    """A linear layer that is not trained, with an adapter of low rank, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


class Quantised(nn.Linear):
    """A linear layer with integers for weights, which are not trained, as of bitsandbytes."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight = nn.Parameter((self.weight * 127).to(torch.int8), requires_grad=False)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) / 127, self.bias)


@pytest.mark.parametrize("make", [lambda: Conv1D(WIDTH, WIDTH), Adapted, Quantised])
def test_layers_of_libraries(make: Callable[[], nn.Module]) -> None:
    module, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), make()), drawn()
    wanted = expected(module, x)
    found, early = in_a_stage(module, x)
    assert early == set()
    assert undeferred_layers(module) == {}
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-6, atol=1e-7)
