"""Random numbers belong to a step, a stage and a microbatch; neither the schedule nor a checkpoint changes them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optpipe.runtime import Stage
from optpipe.runtime.rng import never_draws
from tests.optpipe.runtime.stages import F_B_W, F_BW, F_O_R_B_W, WAYS, Run, run_one, run_step

M = 3


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


MESSAGES = {i: drawn(4, 6, seed=i) for i in range(M)}


class Block(nn.Module):
    """Three linear layers with dropout between, the middle part checkpointed or not."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.middle = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.5))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.middle, x, use_reentrant=False) if self.checkpointed else self.middle(x)
        y: Tensor = self.last(x)
        return y


def equal(a: Run, b: Run) -> bool:
    pairs = zip(
        [*(a.outputs[i] for i in range(M)), *(a.input_gradients[i] for i in range(M)), *a.weight_gradients],
        [*(b.outputs[i] for i in range(M)), *(b.input_gradients[i] for i in range(M)), *b.weight_gradients],
        strict=True,
    )
    return all(torch.equal(x, y) for x, y in pairs)


def in_turn(way: tuple[str, ...]) -> list[tuple[str, int]]:
    """One microbatch after another."""
    return [(kind, i) for i in range(M) for kind in way]


def together(way: tuple[str, ...]) -> list[tuple[str, int]]:
    """All F, then all that follows, one kind after the other."""
    return [(kind, i) for kind in way for i in range(M)]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_is_the_same_in_every_schedule(checkpointed: bool) -> None:
    runs = [
        run_step(Stage(Block(checkpointed=checkpointed), seed=5), order(way), MESSAGES)
        for order, way in itertools.product((in_turn, together), (F_B_W, F_O_R_B_W))
    ]
    assert all(equal(run, runs[0]) for run in runs[1:])
    order_of_forwards = [("F", i) for i in (2, 0, 1)] + [(kind, i) for i in range(M) for kind in ("B", "W")]
    assert equal(run_step(Stage(Block(checkpointed=checkpointed), seed=5), order_of_forwards, MESSAGES), runs[0])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_checkpoint_draws_the_same_masks_again(way: tuple[str, ...]) -> None:
    """Its weight gradients, of layers that ran again within B, wait for W like all others."""
    runs = [run_step(Stage(Block(checkpointed=c), seed=5), together(way), MESSAGES) for c in (False, True)]
    assert equal(*runs)


def test_checkpointed_layers_leave_their_weight_gradients_to_w() -> None:
    stage = Stage(Block(checkpointed=True))
    without_w = run_one(stage, ("F", "B"), MESSAGES[0])
    assert not any(gradient.any() for gradient in without_w.weight_gradients)
    stage.clear()


def masks(stage: Stage, *, steps: int = 1) -> list[Tensor]:
    """Masks of dropout, for two microbatches in each of some steps."""
    ones = {i: torch.ones(1000) for i in range(2)}
    runs = [run_step(stage, [(kind, i) for i in range(2) for kind in F_BW], ones) for _ in range(steps)]
    return [run.outputs[i] > 0 for run in runs for i in range(2)]


def dropping(number: int = 0, **options: int) -> Stage:
    stage = Stage(nn.Dropout(0.5), **options)  # type: ignore[arg-type]
    stage.join(number, {"F", "BW"})
    return stage


def test_microbatches_steps_stages_and_seeds_differ() -> None:
    found = [
        *masks(dropping(seed=1), steps=2),
        *masks(dropping(seed=2)),
        *masks(dropping(1, seed=1)),
    ]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found, 2))
    assert all(400 < kept.sum() < 600 for kept in found)


def test_a_training_that_resumes_goes_on_with_its_numbers() -> None:
    whole, resumed = dropping(seed=1), dropping(seed=1)
    expected = masks(whole, steps=3)[-2:]
    assert whole.random is not None
    assert resumed.random is not None
    resumed.random.step = whole.random.step - 1
    assert all(torch.equal(a, b) for a, b in zip(masks(resumed), expected, strict=True))


def test_the_seed_is_that_of_torch_unless_it_is_given() -> None:
    torch.manual_seed(7)
    stage = dropping()
    torch.manual_seed(8)
    assert all(torch.equal(a, b) for a, b in zip(masks(stage), masks(dropping(seed=7)), strict=True))


def test_the_generators_of_others_go_on_as_if_nothing_had_been_drawn() -> None:
    stage = dropping(seed=1)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    found = [torch.rand(1)]
    masks(stage)
    found.append(torch.rand(1))
    assert torch.equal(torch.cat(found), expected)


def test_it_can_be_left_to_the_generators_of_torch() -> None:
    stage = Stage(nn.Dropout(0.5), own_random_numbers=False)
    torch.manual_seed(3)
    expected = nn.functional.dropout(torch.ones(1000), 0.5) > 0
    torch.manual_seed(3)
    assert torch.equal(masks(stage)[0], expected)


@pytest.mark.parametrize(
    ("module", "never"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)), True),
        (nn.TransformerEncoderLayer(8, 2, dropout=0.0), False),  # of torch, but it holds Dropout
        (nn.MultiheadAttention(8, 2), True),
        (nn.MultiheadAttention(8, 2, dropout=0.1), False),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.1), False),
        (nn.LSTM(4, 4, num_layers=2), True),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout1d(0.1)), False),
        (nn.Sequential(nn.RReLU()), False),
        (nn.FractionalMaxPool2d(2, output_size=2), False),
    ],
)
def test_layers_of_torch_are_known_to_draw_or_not(module: nn.Module, never: bool) -> None:
    assert never_draws(module) is never


def test_a_class_or_forward_of_ones_own_counts_as_drawing() -> None:
    """A function such as nn.functional.dropout in it is seen by nobody."""
    assert not never_draws(Block())
    patched = nn.Linear(4, 4)
    patched.forward = nn.functional.dropout  # type: ignore[method-assign]
    assert not never_draws(patched)


def test_what_draws_in_a_loss_is_the_same_in_every_order() -> None:
    def loss(y: Tensor, _target: Tensor) -> Tensor:
        return nn.functional.dropout(y).sum()

    def losses(order: tuple[int, ...]) -> dict[int, Tensor]:
        stage = Stage(nn.Identity(), loss=loss, seed=5)
        stage.zero_gradients()
        return {i: stage.forward(i, torch.ones(100), torch.ones(1), False) for i in order}

    forwards, backwards = losses((0, 1)), losses((1, 0))
    assert all(torch.equal(forwards[i], backwards[i]) for i in range(2))
