"""Whatever a step changes comes back with every bit, in the tensors that it was in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from optpipe.train.rollback import Snapshot
from tests.optpipe.train.update_tasks import Averaging


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4).requires_grad_(False), Averaging(torch.float32)
    )


def optimizers(parts: nn.Module) -> dict[str, torch.optim.Optimizer]:
    parameters = [p for p in parts.parameters() if p.requires_grad]
    return {
        "adamw": torch.optim.AdamW(parameters, lr=0.1),
        "amsgrad": torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
        "sgd": torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }


def work(parts: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """A forward moves the running statistics, the step everything else."""
    torch.manual_seed(seed)
    optimizer.zero_grad()
    parts(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()


def state(parts: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [torch.as_tensor(value).clone() for value in (*parts.state_dict().values(), *kept)]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", optimizers(module()))
def test_all_comes_back_and_training_goes_on_as_if_nothing_had_been(name: str, steps_before: int) -> None:
    parts, undisturbed = module(), module()
    optimizer, other = optimizers(parts)[name], optimizers(undisturbed)[name]
    snapshot = Snapshot([parts], [optimizer])
    for step in range(steps_before):
        work(parts, optimizer, step)
        work(undisturbed, other, step)
        snapshot.take()
    snapshot.take()
    before = state(parts, optimizer)
    for wrong in (10, 11):
        work(parts, optimizer, wrong)
    snapshot.restore()
    assert all(torch.equal(a, b) for a, b in zip(state(parts, optimizer), before, strict=True))
    for step in (20, 21):
        work(parts, optimizer, step)
        work(undisturbed, other, step)
    pairs = zip(state(parts, optimizer), state(undisturbed, other), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_parameters_and_their_gradients_stay_the_same_tensors() -> None:
    parts = module()
    optimizer = optimizers(parts)["adamw"]
    addresses = [p.data_ptr() for p in parts.parameters()]
    snapshot = Snapshot([parts], [optimizer])
    snapshot.take()
    work(parts, optimizer, 0)
    snapshot.restore()
    assert [p.data_ptr() for p in parts.parameters()] == addresses


def test_the_memory_of_the_copies_is_used_again() -> None:
    parts = module()
    optimizer = optimizers(parts)["adamw"]
    work(parts, optimizer, 0)
    snapshot = Snapshot([parts], [optimizer])
    assert snapshot.size_bytes == 0
    addresses = []
    for step in range(2):
        snapshot.take()
        addresses.append([copy.data_ptr() for copy in snapshot._copies])
        work(parts, optimizer, step)
    assert addresses[0] == addresses[1]
