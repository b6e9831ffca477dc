"""Stages whose blocks are run again one at a time: the gradients of a step that keeps, and one block's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optpipe.errors import TrainingError
from optpipe.runtime import MemoryMeter, Stage
from optpipe.runtime.activations import HostSlab
from optpipe.runtime.recomputation import blocks_of
from tests.optpipe.runtime.stages import F_B_W, F_BW, RECOMPUTED, Run, bytes_of_way, run_step, weighing

M, WIDTH = 3, 8
MESSAGES = {i: torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(M)}
GROUPS = ("selective-groups-2", "selective-groups-3")
MODES = ("selective", "selective-2", "selective:narrow", "selective:inner.2", *GROUPS)


class Block(nn.Module):
    """A residual block with running statistics, dropout, named arguments, and an output that autograd saves."""

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__()
        norm, drop = (
            (nn.Identity(), nn.Identity()) if plain else (nn.BatchNorm1d(WIDTH, momentum=None), nn.Dropout(0.5))
        )
        self.inner = nn.Sequential(norm, nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), drop)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, options: dict[str, Any]) -> Tensor:
        return torch.relu(x + options["scale"] * self.narrow(self.inner(x)))


class Model(nn.Module):
    """Blocks between layers of other kinds, which are called with a tensor that they share."""

    def __init__(self, blocks: int = 3, *, plain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([*(Block(plain=plain) for _ in range(blocks)), nn.Linear(1, 1)])
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        scale = x.new_full((), 0.5)
        for block in self.blocks[:-1]:
            x = block(x, options={"scale": scale, "unused": None})
        return torch.tanh(self.leave(x))


def together(way: tuple[str, ...]) -> list[tuple[str, int]]:
    return [(kind, i) for kind in way for i in range(M)]


def values(run: Run) -> list[Tensor]:
    return [*run.outputs.values(), *run.input_gradients.values(), *run.weight_gradients]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", RECOMPUTED)
def test_gradients_and_running_statistics_are_those_of_a_step_that_keeps(way: str, mode: str) -> None:
    kept, recomputed = Model(), Model()
    plain = F_BW if RECOMPUTED[way][-1] in ("BW", "CBW") else F_B_W
    first = run_step(Stage(kept, seed=7), together(plain), MESSAGES)
    second = run_step(Stage(recomputed, seed=7), together(RECOMPUTED[way]), MESSAGES, mode=mode)
    for one, other in zip(values(first), values(second), strict=True):
        assert torch.equal(one, other)
    buffers = dict(recomputed.named_buffers())
    assert int(buffers["blocks.1.inner.0.num_batches_tracked"]) == M
    for name, buffer in kept.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("own_random_numbers", [True, False])
def test_a_block_draws_its_own_random_numbers_again_whatever_ran_in_between(own_random_numbers: bool) -> None:
    found = []
    orders = [
        [("F", 0), ("F", 1), ("F", 2), ("BW", 0), ("BW", 1), ("BW", 2)],
        [("F", 0), ("F", 1), ("F", 2), ("C", 0), ("BW", 0), ("CBW", 1), ("C", 2), ("BW", 2)],
    ]
    for ops in orders:
        stage = Stage(Model(), seed=7, own_random_numbers=own_random_numbers)
        torch.manual_seed(3)
        found.append(run_step(stage, ops, MESSAGES, mode="selective"))
    assert all(torch.equal(one, other) for one, other in zip(*map(values, found), strict=True))


def test_under_autocast_too() -> None:
    first, second = (
        run_step(Stage(Model(), seed=7, autocast=torch.bfloat16), together(way), MESSAGES, mode="selective")
        for way in (F_BW, ("F", "CBW"))
    )
    assert all(torch.equal(one, other) for one, other in zip(values(first), values(second), strict=True))


def one_block_stage_bytes(kind: str, blocks: int, mode: str) -> tuple[int, int, int]:
    """`bytes_of_way` of a stage of so many blocks."""
    return bytes_of_way(Stage(Model(blocks, plain=True)), MemoryMeter(), MESSAGES[0], kind, mode)


def test_inside_the_backward_there_is_one_block_at_a_time() -> None:
    """A block keeps its input, 4 x 8 floats; made anew, it holds GELU's input and output, four times as wide each."""
    message, wide = 4 * WIDTH * 4, 4 * 4 * WIDTH * 4
    kept = {n: one_block_stage_bytes("CBW", n, "selective")[0] for n in (2, 6)}
    assert (kept[6] - kept[2]) / 4 == message
    ahead = {n: one_block_stage_bytes("C", n, "selective")[1] for n in (2, 6)}
    assert (ahead[6] - ahead[2]) / 4 >= 2 * wide
    inside = {n: one_block_stage_bytes("CBW", n, "selective")[2] for n in (2, 6)}
    assert inside[2] == inside[6] < ahead[6] / 2
    assert inside[6] < one_block_stage_bytes("CBW", 6, "full")[2] / 2


def test_of_a_group_one_input_stays_and_all_of_it_is_there_inside_the_backward() -> None:
    """Beside GELU's input and output, a block that runs again makes the next one's input."""
    message, wide = 4 * WIDTH * 4, 4 * 4 * WIDTH * 4
    found = {g: one_block_stage_bytes("CBW", 6, f"selective-groups-{g}") for g in (1, 2, 3, 6)}
    assert found[1] == one_block_stage_bytes("CBW", 6, "selective")
    for group, inputs in ((2, 3), (3, 2), (6, 1)):
        assert found[1][0] - found[group][0] == (6 - inputs) * message
        assert found[group][2] - found[1][2] == (group - 1) * (2 * wide + message)


@pytest.mark.parametrize("mode", ["selective+offload", "selective-groups-2+offload"])
def test_what_stays_leaves_to_the_host_and_comes_back(mode: str) -> None:
    stage, meter, slab = Stage(Model(plain=True)), MemoryMeter(), HostSlab()
    stage.begin_step()
    stage.zero_gradients()
    with meter, meter.on(0):
        output = stage.forward_of(mode)(0, MESSAGES[0].clone(), None, True, True)
        gradient = weighing(output)
        del output
        kept = meter.live_bytes[0]
        with meter.on(None):
            stage.copy_out(0, slab)
        stage.free(0)
        assert meter.live_bytes[0] < kept / 3
        stage.allocate(0)
        stage.copy_in(0)
        assert meter.live_bytes[0] == kept
        stage.recompute_and_backward(0, gradient)
        del gradient
        assert meter.live_bytes[0] == 0


def test_blocks_are_the_modules_of_the_outermost_lists_most_frequent_class() -> None:
    assert [name for name, _ in blocks_of(Model())] == ["blocks.0", "blocks.1", "blocks.2"]
    layers = nn.Sequential(nn.Embedding(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))
    assert [name for name, _ in blocks_of(layers)] == ["1", "2"]
    assert blocks_of(nn.Linear(4, 4))[0][0] == ""


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("selective-4", r"has 3 block\(s\) \(blocks.0, blocks.1, blocks.2\), but 4 are"),
        ("selective-groups-4", r"has 3 block\(s\) \(blocks.0, blocks.1, blocks.2\), but 4 are to be recomputed at a"),
        ("selective:wide", "has no module 'wide' in its block blocks.0, which has inner, narrow"),
        ("selective-0", "has no mode 'selective-0'. Maybe one of full, selective"),
        ("sparse", "has no mode 'sparse'"),
    ],
)
def test_a_mode_that_a_stage_does_not_have_is_refused_by_name(mode: str, reason: str) -> None:
    with pytest.raises(TrainingError, match=reason):
        Stage(Model()).forward_of(mode)


class Changing(Block):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.inner(torch.relu_(x)))


class Behind(nn.Module):
    """A block whose input is changed in place behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        y = self.blocks[0](x)
        x += 1
        return x + y


class Twice(torch.autograd.Function):
    """Doubles; reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 * (ctx.saved_tensors[0] == ctx.saved_tensors[0])


class Reading(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Twice.apply(x)


class Slope(nn.Linear):
    """Asks for a gradient in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        [slope] = torch.autograd.grad((x**3).sum(), x)
        return slope * x


class Checkpointing(nn.Sequential):
    """Runs its blocks again by itself."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class Counting(nn.Linear):
    """Saves more the second time."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for _ in range(self.calls):
            x = torch.tanh(x)
        return x


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Sequential(Changing(plain=True)), "changes its input in place"),
        (Behind(), "changes the input of its block blocks.0 in place behind it"),
        (nn.Sequential(Reading(WIDTH, WIDTH)), "asks twice"),
        (nn.Sequential(Slope(WIDTH, WIDTH)), "differentiates within its forward"),
        (Checkpointing(nn.Linear(WIDTH, WIDTH)), "runs its block 0 within torch.utils.checkpoint, which recomputes it"),
        (nn.Sequential(Counting(WIDTH, WIDTH)), "saves 4 tensors for its backward when it is run again, but saved 1"),
    ],
    ids=["in place", "behind", "read twice", "differentiates", "checkpoint", "not the same"],
)
def test_what_cannot_be_run_again_is_refused(module: nn.Module, reason: str) -> None:
    with pytest.raises(TrainingError, match=reason):
        run_step(Stage(module), together(("F", "CBW")), MESSAGES, mode="selective")


def test_modules_are_left_as_they_were() -> None:
    module = Model()
    module.blocks[1].forward = module.blocks[1].forward  # a forward of its own, as other tools set it
    own = vars(module.blocks[1])["forward"]
    run_step(Stage(module), together(("F", "CBW")), MESSAGES, mode="selective")
    assert vars(module.blocks[1]).pop("forward") is own
    assert all("forward" not in vars(part) for part in module.modules())
