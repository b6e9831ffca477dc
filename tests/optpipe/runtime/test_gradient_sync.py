"""Shared parameters in one process; replicas, and places in several processes, are tested with training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optpipe.runtime.gradient_sync import GradientSync, shared_buffers, with_groups
from optpipe.runtime.shared_parameters import hold_once, shared_parameters
from optpipe.runtime.stage import Stage


def test_gradients_are_views_of_one_buffer() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()
    (buffer,) = shared_buffers(module.parameters())
    module(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    gradients = [p.grad for p in module.parameters()]
    assert torch.equal(buffer, torch.cat([g.flatten() for g in gradients if g is not None]))
    assert len(buffer) == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("placement", [(0, 1, 1), (0, 0, 0), (0, 1, 0), (0, 1, 2)])
def test_every_place_gets_the_sum_once(placement: tuple[int, ...]) -> None:
    embedding, middle, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.Linear(3, 5)
    middle.weight = head.weight = embedding.weight
    modules = dict(enumerate([nn.Sequential(embedding, nn.Linear(3, 3)), middle, head]))
    [shared] = shared_parameters(list(modules.values()))
    hold_once([shared], modules, placement)
    places = [modules[s].get_parameter(name) for s, name in shared.places]
    stages = {s: Stage(module, first=s == 0) for s, module in modules.items()}
    sync = GradientSync(stages, shared=with_groups([shared], lambda _: [0]))
    for _ in range(2):
        for stage in stages.values():
            stage.zero_gradients()
        for s, parameter in enumerate(places):
            assert parameter.grad is not None
            parameter.grad += 10**s
        sync.finish()
        assert all(p.grad is not None and p.grad.eq(111).all() for p in places)
    assert len({id(p) for p in places}) == len({*placement})
    with torch.no_grad():
        places[0].fill_(7)
    assert all(p.eq(7).all() for p in places)
