"""A stage as tensors and back: every bit of what training changes, in any dtype, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optpipe.errors import CheckpointError
from optpipe.train.checkpoint.files import Disk, read_tensors
from optpipe.train.checkpoint.write import load_stage, stage_tensors


class Odd(nn.Module):
    """A stage with all that a stage may have: a frozen parameter, running statistics, a buffer that is not kept."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=dtype)
        self.norm = nn.BatchNorm1d(4, dtype=dtype)
        self.frozen = nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=False)
        self.register_buffer("cache", torch.randn(5), persistent=False)
        self.again = self.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.again(self.norm(self.linear(x)))
        return found


def names(module: nn.Module) -> dict[str, str]:
    return {name: f"layers.7.{name}" for name, _ in (*module.named_parameters(), *module.named_buffers())}


def tensors_of(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    return stage_tensors(module, optimizer, names(module))


def trained(module: Odd, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(module.linear.weight.dtype)
        optimizer.zero_grad()
        torch.autograd.backward(module(x).square().mean())
        optimizer.step()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in module.parameters() if p.requires_grad), amsgrad=True)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in module.parameters() if p.requires_grad), lr=0.1, momentum=0.9)


def plain_sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in module.parameters() if p.requires_grad), lr=0.1)


@pytest.mark.parametrize("make", [adamw, sgd, plain_sgd])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_stage_that_was_saved_trains_on_as_if_it_had_not_been(make, dtype: torch.dtype, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    first = Odd(dtype)
    optimizer = make(first)
    trained(first, optimizer)
    Disk().write_tensors(tmp_path / "stage", tensors_of(first, optimizer))
    torch.manual_seed(1)
    second = Odd(dtype)
    resumed = make(second)
    load_stage(second, resumed, read_tensors(tmp_path / "stage"), names(second), "stages[0]")
    trained(first, optimizer)
    trained(second, resumed)
    ours, theirs = tensors_of(first, optimizer), tensors_of(second, resumed)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_moments_of_another_dtype_than_the_parameter_stay_what_they_are() -> None:
    module = Odd(torch.bfloat16)
    optimizer = sgd(module)
    moment = torch.randn(4, 4, dtype=torch.float64)
    optimizer.state[module.linear.weight] = {"momentum_buffer": moment}
    other = Odd(torch.bfloat16)
    resumed = sgd(other)
    load_stage(other, resumed, tensors_of(module, optimizer), names(other), "stages[0]")
    assert torch.equal(resumed.state[other.linear.weight]["momentum_buffer"], moment)


def test_what_is_saved_shares_nothing_with_the_model() -> None:
    module = Odd()
    before = tensors_of(module, None)
    kept = {name: tensor.clone() for name, tensor in before.items()}
    trained(module, adamw(module))
    assert all(torch.equal(before[name], kept[name]) for name in kept)
    assert "layers.7.norm.running_mean" in before
    assert "layers.7.frozen" in before
    assert "layers.7.cache" not in before


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            Odd(torch.float64),
            r"stages\[3\]: layers\.7\.frozen is torch.float64 of shape .* in the checkpoint but torch.float32",
        ),
        (nn.Linear(4, 4), r"stages\[3\]: layers\.7\.frozen is in the model but not in the checkpoint\. Maybe"),
    ],
)
def test_another_model_is_refused_by_the_first_name_that_differs(other: nn.Module, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_stage(Odd(), None, tensors_of(other, None), names(Odd()), "stages[3]")


def test_a_refused_checkpoint_changes_nothing() -> None:
    module, tensors = Odd(), tensors_of(Odd(), None)
    before = tensors_of(module, None)
    del tensors["layers.7.norm.weight"]
    with pytest.raises(CheckpointError):
        load_stage(module, None, tensors, names(module), "stages[0]")
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors_of(module, None).items())


def test_numbers_that_the_format_does_not_have_are_refused() -> None:
    tensors_of(nn.Linear(1, 1, dtype=torch.complex64), None)
    with pytest.raises(CheckpointError, match=r"weight is torch.complex128, which safetensors.*Maybe torch.complex64"):
        tensors_of(nn.Linear(1, 1, dtype=torch.complex128), None)


def test_state_beside_tensors_is_refused_when_writing() -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

    with pytest.raises(CheckpointError, match=r"0 \(Counting\) has extra state"):
        tensors_of(nn.Sequential(Counting(1, 1)), None)
    module = Odd()
    optimizer = sgd(module)
    optimizer.state[module.linear.weight] = {"trust": 0.5}
    with pytest.raises(CheckpointError, match=r"keeps trust of linear\.weight as float"):
        tensors_of(module, optimizer)
