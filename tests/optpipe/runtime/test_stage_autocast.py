"""Mixed precision: a stage under autocast does what torch's autocast does in a plain step.

Tolerance: bfloat16 has 8 bits, so one rounding is off by up to 2^-8 of a value. Both steps round the same products,
but may add up in another order before they round; two roundings, 2^-7 of the largest gradient, bound the difference.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optpipe.runtime import Stage
from tests.optpipe.runtime.stages import WAYS, Run, plain_step, run_one

BF16 = torch.bfloat16
TOLERANCE = 2.0**-7


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class Tied(nn.Module):
    """A weight in a layer that splits and in a product that autograd alone sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.linear(x).tanh(), self.linear.weight)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return x + y


class PartlyExact(nn.Module):
    """Leaves autocast for a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rough, self.exact = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rough(x)
        with torch.autocast("cpu", enabled=False):
            y: Tensor = self.exact(x.float())
        return y


MODULES = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8)), (8, 16)),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.ConvTranspose1d(8, 4, 3)), (2, 4, 16)),
    "tied": (Tied, (8, 16)),
    "checkpointed": (Checkpointed, (8, 16)),
    "partly exact": (PartlyExact, (8, 16)),
}


@pytest.fixture(params=MODULES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Run]:
    """A module, a message, and what the plain step under autocast gives."""
    make, shape = MODULES[request.param]
    torch.manual_seed(0)
    module: nn.Module = make()

    def autocasting(x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            y: Tensor = plain(x)
            return y

    plain = copy.deepcopy(module)
    wrapped = nn.Module()
    wrapped.plain, wrapped.forward = plain, autocasting
    return module, drawn(*shape), plain_step(wrapped, drawn(*shape))


def error(found: Tensor, plain: Tensor) -> float:
    assert found.dtype == plain.dtype
    return float((found.float() - plain.float()).abs().max() / plain.float().abs().max())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_it_equals_the_plain_step_under_autocast(case: tuple[nn.Module, Tensor, Run], way: tuple[str, ...]) -> None:
    module, x, plain = case
    found = run_one(Stage(module, autocast=BF16), way, x)
    assert error(found.outputs[0], plain.outputs[0]) <= TOLERANCE
    assert error(found.input_gradients[0], plain.input_gradients[0]) <= TOLERANCE
    for gradient, expected in zip(found.weight_gradients, plain.weight_gradients, strict=True):
        assert gradient.dtype == torch.float32
        assert error(gradient, expected) <= TOLERANCE


def test_layers_really_compute_in_bfloat16() -> None:
    module = nn.Linear(16, 16)
    exact = plain_step(module, drawn(8, 16))
    found = run_one(Stage(module, autocast=BF16), WAYS["split"], drawn(8, 16))
    assert found.outputs[0].dtype == BF16
    assert 0 < error(found.weight_gradients[0], exact.weight_gradients[0]) <= TOLERANCE


def test_float64_is_left_as_it_is() -> None:
    module = nn.Linear(16, 16, dtype=torch.float64)
    plain = plain_step(module, drawn(8, 16).double())
    found = run_one(Stage(module, autocast=BF16), WAYS["split"], drawn(8, 16).double())
    assert torch.equal(found.outputs[0], plain.outputs[0])


def test_a_loss_may_be_in_bfloat16() -> None:
    stage = Stage(nn.Linear(16, 16), loss=lambda y, _target: y.square().mean(), autocast=BF16)
    found = run_one(stage, WAYS["split"], drawn(8, 16), drawn(8, 16))
    assert found.outputs[0].dtype == BF16
    assert found.weight_gradients[0].any()
