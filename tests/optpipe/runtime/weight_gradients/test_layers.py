"""Layers that split their backward and stay what they were otherwise, and layers of a user's that join them."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from optpipe.errors import TrainingError
from optpipe.runtime.weight_gradients import (
    SplitBackward,
    SplitLinear,
    WeightGradients,
    accumulate,
    compiled_part,
    defer_weight_gradients,
    layers,
    register_deferred,
)
from tests.optpipe.runtime.weight_gradients.layers import (
    F64,
    Gradients,
    at_once,
    by_autograd,
    drawn,
    only_input,
    weight_gradients,
    zero,
)


class Scale(nn.Module):
    """y = x * weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, width, dtype=F64))

    def forward(self, x: Tensor, power: float = 1) -> Tensor:
        return x * self.weight**power


class SplitScale(SplitBackward[Scale]):
    def forward(self, layer: Scale, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return x * layer.weight, (x,)

    def input_gradient(self, layer: Scale, saved: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        return gradient * layer.weight

    def add_weight_gradients(self, layer: Scale, saved: tuple[Tensor, ...], gradient: Tensor) -> None:
        accumulate(layer.weight, (gradient * saved[0]).flatten(0, -2).sum(0))


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class OwnInitialisation(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    known = dict(layers._SPLITS)
    yield
    layers._SPLITS.clear()
    layers._SPLITS.update(known)


def waits(module: nn.Module, x: Tensor) -> bool:
    """True if any weight gradient waits for W; in any case all must be right in the end."""
    expected = by_autograd(module, x)[1]
    pending = WeightGradients()
    defer_weight_gradients(module, pending)
    zero(module)
    only_input(module, x, pending)
    after_b = weight_gradients(module)
    pending.compute(0)
    torch.testing.assert_close(weight_gradients(module), expected, rtol=1e-13, atol=1e-13)
    return any(not torch.equal(a, b) for a, b in zip(after_b, expected, strict=True))


def test_a_layer_of_ones_own_splits_once_it_is_registered() -> None:
    assert not waits(Scale(5), drawn(2, 4, 5))
    register_deferred(Scale, SplitScale())
    assert waits(Scale(5), drawn(2, 4, 5))
    assert waits(nn.Sequential(Scale(5), nn.Tanh()), drawn(2, 4, 5))


def test_a_call_that_is_not_that_of_the_split_is_left_to_autograd() -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale(5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.scale(x, power=2)
            return y

    register_deferred(Scale, SplitScale())
    assert not waits(Squared(), drawn(4, 5))


def test_a_subclass_defers_its_products_and_may_be_registered() -> None:
    for kind in (OwnForward, OwnInitialisation):
        assert waits(kind(5, 3, dtype=F64), drawn(4, 5))
    register_deferred(OwnInitialisation, SplitLinear())
    assert waits(OwnInitialisation(5, 3, dtype=F64), drawn(4, 5))


def test_a_layer_keeps_the_signature_of_its_forward() -> None:
    """torchtitan asks the class for the names of what forward takes, and redistributes by these names."""
    layer = nn.Linear(5, 3)
    defer_weight_gradients(layer, WeightGradients())
    assert type(layer) is not nn.Linear
    assert [*inspect.signature(type(layer).forward).parameters] == ["self", "input"]


def test_a_kind_is_registered_once() -> None:
    with pytest.raises(TrainingError, match="Linear is registered already, with SplitLinear"):
        register_deferred(nn.Linear, SplitLinear())


def pruned() -> nn.Module:
    layer = nn.Linear(5, 3, dtype=F64)
    prune.l1_unstructured(layer, "weight", amount=0.3)  # type: ignore[no-untyped-call]
    return layer


def patched() -> nn.Module:
    layer = nn.Linear(5, 3, dtype=F64)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight).tanh() + layer.bias  # type: ignore[method-assign]
    return layer


def hooked() -> nn.Module:
    layer = nn.Linear(5, 3, bias=False, dtype=F64)
    layer.weight.register_hook(lambda gradient: 2 * gradient)
    return layer


LEFT = {
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(5, 3, dtype=F64)), (4, 5)),
    "pruned": (pruned, (4, 5)),
    "patched": (patched, (4, 5)),
    "parameter with a hook": (hooked, (4, 5)),
    "padded by reflection": (lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="reflect", dtype=F64), (2, 4, 7)),
    "padded to the same": (lambda: nn.Conv1d(4, 6, 2, padding="same", dtype=F64), (2, 4, 7)),
    "layer norm": (lambda: nn.LayerNorm(5, dtype=F64), (4, 5)),
    "batch norm": (lambda: nn.BatchNorm1d(5, dtype=F64), (4, 5)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("name", LEFT)
def test_autograd_keeps_what_has_no_split(name: str) -> None:
    make, shape = LEFT[name]
    assert not waits(make(), drawn(*shape))


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_autograd_keeps_embeddings_with_gradients_of_their_own(option: dict[str, float]) -> None:
    assert not waits(nn.Embedding(6, 3, dtype=F64, **option), torch.tensor([1, 4, 1]))  # type: ignore[arg-type]


def test_running_statistics_are_updated_once_by_f() -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).to(F64)
    plain = copy.deepcopy(module)
    by_autograd(plain, drawn(4, 5))
    pending = WeightGradients()
    defer_weight_gradients(module, pending)
    only_input_then_weights(module, pending)
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), plain.buffers(), strict=True))


def only_input_then_weights(module: nn.Module, pending: WeightGradients) -> None:
    zero(module)
    only_input(module, drawn(4, 5), pending)
    pending.compute(0)


@pytest.fixture
def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Sequential(nn.Conv1d(4, 4, 3), nn.Linear(3, 3))).to(F64)


def test_parameters_names_types_and_text_stay(block: nn.Sequential) -> None:
    parameters = {name: id(p) for name, p in block.named_parameters()}
    keys, text, layers = list(block.state_dict()), repr(block), list(block.modules())
    defer_weight_gradients(block, WeightGradients())
    assert {name: id(p) for name, p in block.named_parameters()} == parameters
    assert (list(block.state_dict()), repr(block)) == (keys, text)
    assert all(a is b for a, b in zip(block.modules(), layers, strict=True)), "who holds a layer holds it still"
    assert isinstance(block[0], nn.Linear)
    assert block[0].in_features == 5


def test_the_mode_reaches_layers(block: nn.Sequential) -> None:
    defer_weight_gradients(block.eval(), WeightGradients())
    assert not any(module.training for module in block.modules())
    assert all(module.training for module in block.train().modules())


def test_state_is_loaded_into_what_it_was_saved_from(block: nn.Sequential) -> None:
    saved = copy.deepcopy(block.state_dict())
    defer_weight_gradients(block, WeightGradients())
    with torch.no_grad():
        block[0].weight.zero_()
    block.load_state_dict(saved)
    assert torch.equal(block[0].weight, saved["0.weight"])


def test_copies_are_plain(block: nn.Sequential) -> None:
    """A copy is in no stage."""
    pending = WeightGradients()
    defer_weight_gradients(block, pending)
    whole = io.BytesIO()
    torch.save(block, whole)
    whole.seek(0)
    for copied in (copy.deepcopy(block), torch.load(whole, weights_only=False)):
        assert type(copied[0]) is nn.Linear
        assert torch.equal(copied[0].weight, block[0].weight)
        assert waits(copied.eval(), drawn(2, 4, 5)), "it can be split in its turn"


def test_hooks_of_modules_run() -> None:
    module, pending = nn.Sequential(nn.Linear(5, 3, dtype=F64)), WeightGradients()
    seen: list[str] = []
    module[0].register_forward_pre_hook(lambda *_: seen.append("before F"))
    module[0].register_forward_hook(lambda _m, _x, y: seen.append("after F") or 2 * y)
    module[0].register_full_backward_hook(lambda *_: seen.append("B"))
    expected = by_autograd(module, drawn(4, 5))
    defer_weight_gradients(module, pending)
    torch.testing.assert_close(at_once(module, drawn(4, 5), pending), expected)
    assert seen == ["before F", "after F", "B"] * 2


def test_a_layer_belongs_to_the_stage_made_last() -> None:
    layer, first, second = nn.Linear(5, 3, dtype=F64), WeightGradients(), WeightGradients()
    defer_weight_gradients(layer, first)
    defer_weight_gradients(layer, second)
    expected: Gradients = by_autograd(layer, drawn(4, 5))
    torch.testing.assert_close(at_once(layer, drawn(4, 5), second), expected)
    with pytest.raises(TrainingError, match=r"belongs to another Stage that was made later. Maybe"), first.forward():
        pass


def test_compiled_parts_are_found(block: nn.Sequential) -> None:
    assert compiled_part(block) is None
    block[2].compile(backend="eager")
    assert compiled_part(block) == "2"
    assert compiled_part(torch.compile(block, backend="eager")) == ""
