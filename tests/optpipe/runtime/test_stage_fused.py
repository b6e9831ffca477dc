"""F that knows of a BW to come leaves small layers to autograd, and large ones split as ever."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optpipe.runtime import Stage
from tests.optpipe.runtime.stages import plain_step, weighing

SMALL, LARGE = 8, 128
"""Widths of linear layers: 256 bytes of weights, and 64 KiB."""


def layer_nodes(width: int, *, fused: bool) -> str:
    """Nodes that F put into the graph for a linear layer."""
    stage = Stage(nn.Linear(width, width))
    stage.zero_gradients()
    stage.forward(0, torch.ones(2, width), None, False, fused)
    (edge,) = stage._graphs[0].links[0][1]._edges
    assert edge is not None
    return type(edge.node).__name__


def test_only_small_layers_are_left_to_autograd_and_only_before_bw() -> None:
    assert layer_nodes(SMALL, fused=True) == "AddmmBackward0"
    assert {layer_nodes(SMALL, fused=False), layer_nodes(LARGE, fused=True)} == {"_SplitBackward"}


class Mixed(nn.Module):
    """A small and a large layer, the small one within a checkpoint or not."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.small = nn.Sequential(nn.Linear(SMALL, SMALL), nn.Tanh())
        self.large = nn.Linear(SMALL, 64 * LARGE)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.small, x, use_reentrant=False) if self.checkpointed else self.small(x)
        y: Tensor = self.large(x)
        return y


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("apart", [False, True], ids=["BW", "B and W"])
def test_gradients_are_those_of_autograd(checkpointed: bool, apart: bool) -> None:
    """With B and W after all, those of small layers come in B."""
    x = torch.randn(4, SMALL, generator=torch.Generator().manual_seed(1))
    plain = plain_step(Mixed(checkpointed=checkpointed), x)
    stage = Stage(Mixed(checkpointed=checkpointed))
    stage.zero_gradients()
    output = stage.forward(0, x.clone(), None, False, fused=True)
    found = (stage.backward_input if apart else stage.backward)(0, weighing(output))
    if apart:
        stage.backward_weight(0)
    torch.testing.assert_close(found, plain.input_gradients[0])
    torch.testing.assert_close([p.grad for p in stage.module.parameters()], plain.weight_gradients)


def test_under_autocast_all_layers_split() -> None:
    """Autograd would hold a cast copy of each weight until the backward."""
    stage = Stage(nn.Linear(SMALL, SMALL), autocast=torch.bfloat16)
    stage.zero_gradients()
    stage.forward(0, torch.ones(2, SMALL), None, False, fused=True)
    (edge,) = stage._graphs[0].links[0][1]._edges
    assert edge is not None
    assert type(edge.node).__name__ == "_SplitBackward"
