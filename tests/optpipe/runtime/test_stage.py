"""One stage alone: messages of every form, frozen and compiled parts, and what a plain step would give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from optpipe.errors import TrainingError
from optpipe.runtime import Stage
from optpipe.runtime.messages import Tree
from tests.optpipe.runtime.stages import F_B_W, F_BW, WAYS, plain_step, run_one

F64 = torch.float64

DYNAMO_WARNS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
"""It looks at `.grad` of whatever it is given."""


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(1))


class Masked(nn.Module):
    """Takes and gives (x, {mask, scale, unused}): a boolean, a float that passes through, one that ends here."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=F64)

    def forward(self, message: Tree) -> Tree:
        x, more = message
        x = self.linear(x).masked_fill(more["mask"], 0) * more["scale"]
        return x, {"mask": ~more["mask"], "scale": more["scale"], "unused": torch.ones(2, dtype=F64)}


def masked() -> Tree:
    more = {"mask": drawn(4, 5) > 0, "scale": drawn(4, 1), "unused": drawn(2)}
    return drawn(4, 5), more


def test_messages_may_be_trees() -> None:
    torch.manual_seed(0)
    module = Masked()
    plain = plain_step(module, masked())
    plain.input_gradients[0][1]["unused"] = torch.zeros(2, dtype=F64)
    for way in WAYS.values():
        found = run_one(Stage(copy.deepcopy(module)), way, masked())
        torch.testing.assert_close(found.outputs[0], plain.outputs[0])
        torch.testing.assert_close(found.weight_gradients, plain.weight_gradients, rtol=1e-13, atol=1e-13)
        (x, more), (plain_x, plain_more) = found.input_gradients[0], plain.input_gradients[0]
        torch.testing.assert_close(x, plain_x, rtol=1e-13, atol=1e-13)
        assert more.pop("mask") is None is plain_more["mask"]
        torch.testing.assert_close(more, {name: plain_more[name] for name in ("scale", "unused")})


def test_a_message_of_integers_has_no_gradient() -> None:
    found = run_one(Stage(nn.Embedding(6, 3)), F_B_W, torch.tensor([1, 4]))
    assert found.input_gradients[0] is None
    assert found.weight_gradients[0].any()


class Constant(nn.Module):
    """Its output depends on nothing that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * 2


@pytest.mark.parametrize("frozen", [False, True])
def test_where_nothing_depends_on_the_message_its_gradient_is_zero(frozen: bool) -> None:
    """The stage before waits for a gradient of that shape."""
    found = run_one(Stage(Constant().requires_grad_(not frozen)), F_BW, drawn(4, 5))
    gradient = found.input_gradients[0]
    assert (gradient.shape, gradient.dtype, gradient.any().item()) == ((4, 5), F64, False)


def test_a_first_stage_that_is_frozen_does_nothing_in_its_backward() -> None:
    stage = Stage(nn.Linear(5, 3, dtype=F64).requires_grad_(False), first=True)
    found = run_one(stage, F_B_W, drawn(4, 5))
    assert (found.input_gradients[0], found.weight_gradients) == (None, [])


def test_a_frozen_stage_passes_gradients_on() -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).to(F64).requires_grad_(False)
    found, plain = run_one(Stage(module), F_B_W, drawn(4, 5)), plain_step(module, drawn(4, 5))
    torch.testing.assert_close(found.input_gradients[0], plain.input_gradients[0], rtol=1e-13, atol=1e-13)
    assert found.weight_gradients == []


def test_a_layer_may_change_the_message_in_place() -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 3, dtype=F64))
    found = run_one(Stage(module), F_B_W, drawn(4, 5))
    plain = plain_step(nn.Sequential(nn.ReLU(), module[1]), drawn(4, 5))
    torch.testing.assert_close(found.input_gradients[0], plain.input_gradients[0], rtol=1e-13, atol=1e-13)


def test_an_output_that_is_no_tensor_is_refused() -> None:
    class WithCache(nn.Linear):
        def forward(self, x: Tensor) -> Tree:
            return super().forward(x), None

    with pytest.raises(TrainingError, match=r"a stage returned NoneType in its output, .* Maybe leave it out"):
        Stage(WithCache(5, 3, dtype=F64)).forward(0, drawn(4, 5), None, offloads=False)


def test_outside_of_its_stage_a_module_is_what_it_was() -> None:
    module = nn.Linear(5, 3, dtype=F64)
    before = plain_step(module, drawn(4, 5))
    Stage(module)
    after = plain_step(module, drawn(4, 5))
    assert all(torch.equal(a, b) for a, b in zip(before.weight_gradients, after.weight_gradients, strict=True))


def compiled() -> nn.Module:
    whole = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 3))).to(F64)
    whole[1] = torch.compile(whole[1], backend="eager")
    return whole


@DYNAMO_WARNS
def test_a_compiled_stage_runs_fused() -> None:
    module = compiled()
    found, plain = run_one(Stage(module), F_BW, drawn(4, 5)), plain_step(module, drawn(4, 5))
    torch.testing.assert_close(found.input_gradients[0], plain.input_gradients[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found.weight_gradients, plain.weight_gradients, rtol=1e-13, atol=1e-13)


def test_a_compiled_stage_refuses_programs_with_b_and_w() -> None:
    stage = Stage(compiled())
    stage.join(3, {"F", "BW", "O", "R"})
    with pytest.raises(TrainingError, match=r"stages\[3\]: module\.1 is compiled by torch\.compile.*Maybe solve with"):
        stage.join(3, {"F", "B", "W"})


@DYNAMO_WARNS
def test_a_layer_within_a_compiled_function_is_left_to_autograd() -> None:
    """Nothing tells that the module's forward is compiled within; its gradients are right all the same, in B."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3, dtype=F64)

        @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            return y

    module = Inside()
    plain = plain_step(copy.deepcopy(module), drawn(4, 5))
    found = run_one(Stage(module), F_B_W, drawn(4, 5))
    torch.testing.assert_close(found.weight_gradients, plain.weight_gradients, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, r"autocast is torch\.float16, .* Maybe torch\.bfloat16"),
        (torch.float32, r"autocast is torch\.float32 but must be torch\.bfloat16 or None"),
    ],
)
def test_another_autocast_than_bfloat16_is_refused(dtype: torch.dtype, expected: str) -> None:
    with pytest.raises(TrainingError, match=expected):
        Stage(nn.Linear(5, 3), autocast=dtype)
