"""Dropout in slices is that of whole sequences: outputs and gradients are those of the unsliced stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from optpipe.runtime import Stage, slice_context
from optpipe.runtime.slices import slice_context as running

N, S, WIDTH, HEADS = 2, 7, 8, 2
CUT = (3, 2, 2)
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.3, is_causal=mask is None)


def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """One key and value for all heads, and a mask of booleans."""
    seen = (torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool) if mask is None else mask > -1).tril(
        k.shape[-2] - q.shape[-2]
    )
    return functional.scaled_dot_product_attention(q, k[:, :1], v[:, :1], seen, 0.3, enable_gqa=True)


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        mask = torch.full((q.shape[-2], k.shape[-2]), -torch.inf, dtype=q.dtype).triu(1)
    weights = (q @ k.transpose(-2, -1) / 2 + mask).softmax(-1)
    return functional.dropout(weights, 0.3) @ v


class Block(nn.Module):
    """Attention and a perceptron with dropout in each, in place and not."""

    takes_slices = True

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner, self.outer = nn.Dropout(0.5, inplace=True), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        context, mask = slice_context(), None
        if context is not None:
            k, v = context.extend(self, k, v)
            mask = context.causal_mask(q) if context.index else None
        mixed = self.attention(q, k, v, mask).transpose(1, 2).flatten(2)
        x = x + self.outer(self.mix(mixed))
        return x + self.narrow(self.inner(functional.gelu(self.widen(x))))


class Blocks(nn.Module):
    """Two blocks, run again by torch's own checkpoints if asked."""

    def __init__(self, attention: Attention, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2)).double()
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def drawn(seed: int) -> Tensor:
    return torch.randn(N, S, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(module: Blocks, cut: Sequence[int], mode: str | None = None) -> list[Tensor]:
    """Outputs, gradients of the inputs and of the weights after two microbatches."""
    stage = Stage(module, seed=5, slices=len(cut))
    stage.sequences.length = S
    stage.begin_step()
    stage.zero_gradients()
    ends = [sum(cut[:q]) for q in range(len(cut) + 1)]
    found = []
    for i in range(2):
        parts = [(i * len(cut) + q, *ends[q : q + 2]) for q in range(len(cut))]
        forward = stage.forward_of(mode)
        outputs = [forward(unit, drawn(i)[:, a:b].contiguous(), None, False, fused=True) for unit, a, b in parts]
        gradients = []
        for unit, a, b in reversed(parts):
            gradient = drawn(10 + i)[:, a:b].contiguous()
            gradients.insert(0, stage.recompute_and_backward(unit, gradient))
        found += [torch.cat(outputs, 1), torch.cat(gradients, 1)]
    return found + [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("mode", [None, "full", "selective"])
@pytest.mark.parametrize("attention", [fused, grouped, by_hand])
def test_a_sliced_stage_drops_what_the_unsliced_one_drops(attention: Attention, mode: str | None) -> None:
    whole = run(Blocks(attention), (S,))
    for one, other in zip(run(Blocks(attention), CUT, mode), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    undropped = run(Blocks(attention).eval(), (S,))
    assert not torch.allclose(whole[0], undropped[0]), "something is dropped"


def test_a_checkpoint_drops_the_same_again() -> None:
    whole = run(Blocks(fused), (S,))
    for one, other in zip(run(Blocks(fused, checkpointed=True), CUT), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_functions_of_torch_are_replaced_while_a_slice_runs_alone() -> None:
    before = functional.dropout, functional.scaled_dot_product_attention
    run(Blocks(fused), CUT)
    assert (functional.dropout, functional.scaled_dot_product_attention) == before
    assert running() is None


class Noise(nn.Module):
    """Draws by a function that nothing replaces, and drops what has no sequence."""

    takes_slices = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        dropped = functional.dropout(torch.ones(WIDTH, dtype=torch.float64), 0.5)
        y: Tensor = self.linear(x) + torch.rand_like(x) + dropped
        return y


def test_other_random_numbers_are_of_each_slice() -> None:
    torch.manual_seed(0)
    stage = Stage(Noise(), seed=5, slices=7)
    stage.sequences.length = S
    stage.begin_step()
    same = torch.ones(N, 1, WIDTH, dtype=torch.float64)
    outputs = [stage.forward(q, same, None, offloads=False) for q in range(S)]
    assert all(not torch.equal(a, b) for a, b in pairwise(outputs))
