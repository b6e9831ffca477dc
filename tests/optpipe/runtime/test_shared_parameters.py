"""Shared parameters: found by identity, held once in a process, refused where they cannot be one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from optpipe.errors import TrainingError
from optpipe.runtime.shared_parameters import hold_once, shared_parameters, with_own_modules
from optpipe.runtime.stage import Stage


class Twice(nn.Module):
    """Has one weight under two names, and beside them in a list."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.one = self.other = weight

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x @ self.one @ self.other.T
        return mixed


def linear(weight: nn.Parameter | None = None) -> nn.Linear:
    layer = nn.Linear(4, 4, bias=False)
    if weight is not None:
        layer.weight = weight
    return layer


def test_places_are_found_by_identity() -> None:
    first, alone = linear(), linear()
    alone.weight.data.copy_(first.weight.data)
    stages = [
        nn.Sequential(nn.Identity(), first),
        Twice(first.weight),
        alone,
        linear(first.weight).requires_grad_(False),
    ]
    [shared] = shared_parameters(stages)
    assert shared.places == ((0, "1.weight"), (1, "one"), (3, "weight"))
    assert not shared.trained
    assert shared.places_in({1, 3}) == [(1, "one"), (3, "weight")]
    assert str(shared) == "stages[0].1.weight = stages[1].one = stages[3].weight"
    assert shared_parameters([Twice(first.weight), alone]) == []


def test_each_device_of_a_process_has_a_gradient_of_its_own_and_no_weight() -> None:
    first = linear()
    modules: dict[int, nn.Module] = dict(enumerate([first, Twice(first.weight), linear(first.weight)]))
    shared = shared_parameters(list(modules.values()))
    hold_once(shared, modules, [0, 1, 0])
    twice = modules[1]
    assert isinstance(twice, Twice)
    assert twice.one is twice.other
    assert twice.one is not first.weight
    assert twice.one.data_ptr() == first.weight.data_ptr()
    assert modules[2].weight is first.weight


def test_stages_that_were_moved_apart_hold_it_once_again() -> None:
    first = linear()
    modules: dict[int, nn.Module] = {0: first, 2: linear(first.weight)}
    shared = shared_parameters([modules[0], nn.Identity(), modules[2]])
    modules[2].weight = nn.Parameter(first.weight.detach().clone())
    hold_once(shared, modules, [0, 1, 0])
    assert modules[2].weight is first.weight


def test_a_module_of_two_stages_becomes_two_that_share_what_they_have() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    lstm, rotary = nn.LSTM(4, 4), nn.Identity()
    stages = with_own_modules([nn.Sequential(block, rotary), block, nn.Sequential(block, block, rotary, lstm), lstm])
    assert {id(part) for part in stages[0].modules()} & {id(part) for part in stages[1].modules()} == set()
    assert stages[0][0] is block
    assert stages[2][0] is stages[2][1]
    assert stages[0][1] is stages[2][2] is rotary, "what has no parameter may serve several stages"
    assert [len(shared.places) for shared in shared_parameters(stages)] == [3, 3, 3, 3] + 4 * [2]
    x = torch.ones(2, 4)
    assert torch.equal(stages[1](x), stages[0](x))
    wrapped = [Stage(stage, first=s == 0) for s, stage in enumerate(stages[:2])]
    for stage in wrapped:
        stage.forward(0, x, None, offloads=False)


def test_a_copy_of_a_module_keeps_its_own_lists_of_weights() -> None:
    lstm = nn.LSTM(4, 4)
    modules = dict(enumerate(with_own_modules([lstm, lstm])))
    hold_once(shared_parameters(list(modules.values())), modules, [0, 1])
    first, second = modules[0], modules[1]
    assert isinstance(first, nn.LSTM)
    assert isinstance(second, nn.LSTM)
    assert all(a is not b for a, b in zip(first._flat_weights, second._flat_weights, strict=True))
    assert all(a is b for a, b in zip(second._flat_weights, second.parameters(), strict=True))


def test_parts_of_one_memory_that_do_not_overlap_are_parameters_of_their_own() -> None:
    first, second = linear(), linear()
    memory = torch.zeros(32)
    first.weight, second.weight = (nn.Parameter(part.view(4, 4)) for part in memory.split(16))
    assert shared_parameters([first, second]) == []
    meta = linear().to("meta")
    assert shared_parameters([meta, linear().to("meta"), nn.LazyLinear(3)]) == []


@pytest.mark.parametrize("part", [slice(0, 4), slice(2, 3), slice(3, None)])
def test_parts_that_overlap_are_refused_unless_nothing_is_trained(part: slice) -> None:
    first, second = nn.Linear(4, 4), nn.Module()
    second.rows = nn.Parameter(first.weight.data[part])
    expected = r"stages\[0\]\.weight and stages\[1\]\.rows lie in the same memory but are not one .* Maybe let both"
    with pytest.raises(TrainingError, match=expected):
        shared_parameters([first, second])
    assert shared_parameters([first.requires_grad_(False), second.requires_grad_(False)]) == []
