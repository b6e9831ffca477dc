"""Nothing that a step made is alive after it, nor after an error within it: no cycle of references waits for gc."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optpipe.kinds import RECOMPUTATIONS
from optpipe.runtime import MemoryMeter, Stage
from optpipe.runtime.activations import HostSlab
from tests.optpipe.runtime.stages import RECOMPUTED, WAYS, backward_of, play_between


@pytest.fixture(autouse=True)
def _without_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Breaks(torch.autograd.Function):
    """The identity; its backward fails where it is told to."""

    failing = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Breaks.failing:
            raise ValueError("the backward broke")
        return gradient


class Block(nn.Module):
    """A layer of each kind, with dropout; may fail in either direction."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.first, self.convolution = nn.Linear(8, 8), nn.Conv1d(4, 4, 3, padding=1)
        self.rest = nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 8))
        self.checkpointed = checkpointed
        self.failing = False

    def forward(self, x: Tensor) -> Tensor:
        x = Breaks.apply(self.convolution(self.first(x)))  # type: ignore[no-untyped-call]
        x = checkpoint(self.rest, x, use_reentrant=False) if self.checkpointed else self.rest(x)
        if self.failing:
            raise ValueError("the forward broke")
        return x


def play(stage: Stage, way: tuple[str, ...], meter: MemoryMeter, microbatches: int = 2, mode: str = "full") -> None:
    """All microbatches through one op after the other, in a frame that ends; recomputed ones are in `mode`."""
    slabs = [HostSlab(1 << 16) for _ in range(microbatches)]
    with meter, meter.on(0):
        for kind in way:
            for i in range(microbatches):
                if kind == "F":
                    forward = stage.forward_of(None if set(RECOMPUTATIONS).isdisjoint(way) else mode)
                    forward(i, torch.randn(2, 4, 8), None, "O" in way)
                elif not play_between(stage, kind, i, slabs[i]):
                    backward_of(stage, kind)(i, torch.randn(2, 4, 8))


@pytest.fixture(params=[False, True], ids=["plain", "checkpointed"])
def block(request: pytest.FixtureRequest) -> Block:
    return Block(checkpointed=request.param)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_nothing_lives_after_a_step(block: Block, way: tuple[str, ...], autocast: torch.dtype | None) -> None:
    stage, meter = Stage(block, autocast=autocast), MemoryMeter()
    stage.zero_gradients()
    for _ in range(3):
        play(stage, way, meter)
        assert meter.live_bytes[0] == 0
    assert meter.peak_bytes[0] > 0


@pytest.mark.parametrize("way", RECOMPUTED.values(), ids=RECOMPUTED)
def test_nothing_lives_after_blocks_ran_again(block: Block, way: tuple[str, ...]) -> None:
    """Also where a block has checkpoints of its own."""
    stage, meter = Stage(nn.Sequential(block, Block(checkpointed=block.checkpointed))), MemoryMeter()
    stage.zero_gradients()
    for _ in range(3):
        play(stage, way, meter, mode="selective")
        assert meter.live_bytes[0] == 0
    assert meter.peak_bytes[0] > 0


def broken(stage: Stage, way: tuple[str, ...], meter: MemoryMeter) -> str:
    """Text of the error; its frames, which hold tensors, are gone when this returns."""
    try:
        play(stage, way, meter)
    except ValueError as error:
        return str(error)
    return "no error"


def recovers(stage: Stage, meter: MemoryMeter) -> bool:
    """True if a step runs to its end after the error, and leaves nothing."""
    play(stage, WAYS["split"], meter)
    return meter.live_bytes[0] == 0


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_nothing_lives_after_an_error_in_f(block: Block, way: tuple[str, ...]) -> None:
    stage, meter = Stage(block), MemoryMeter()
    stage.zero_gradients()
    stage.forward(7, torch.randn(2, 4, 8), None, offloads=False)
    block.failing = True
    assert broken(stage, way, meter) == "the forward broke"
    block.failing = False
    stage.clear()
    assert meter.live_bytes[0] == 0
    assert recovers(stage, meter)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_nothing_lives_after_an_error_in_b(block: Block, way: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    stage, meter = Stage(block), MemoryMeter()
    stage.zero_gradients()
    monkeypatch.setattr(Breaks, "failing", True)
    assert broken(stage, way, meter) == "the backward broke"
    monkeypatch.setattr(Breaks, "failing", False)
    stage.clear()
    assert meter.live_bytes[0] == 0
    assert recovers(stage, meter)


def test_nothing_lives_after_an_error_in_w(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, meter = Stage(block), MemoryMeter()
    stage.zero_gradients()

    def fails(*_: Any) -> None:
        raise ValueError("the weight gradient broke")

    monkeypatch.setattr(type(block.convolution)._split, "add_weight_gradients", fails)
    assert broken(stage, WAYS["split"], meter) == "the weight gradient broke"
    monkeypatch.undo()
    stage.clear()
    assert meter.live_bytes[0] == 0
    assert recovers(stage, meter)
