"""Measured sizes, recomputed by hand: of trees, checkpoints, autocast, and splits that hold more than the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optpipe.errors import TrainingError
from optpipe.runtime import MessageSpec, Stage
from optpipe.runtime.messages import Tree
from optpipe.runtime.probe import StageSizes, learn_messages, measure_stage
from tests.optpipe.runtime.chains import batch, chain, specs, stages_of
from tests.optpipe.runtime.stages import F_BW, run_one

N, C = 4, 16
ROWS = N * C * 4
"""Bytes of one activation in float32."""
SPEC = MessageSpec((N, C), torch.float32)


def sizes(module: nn.Module, before: Tree = SPEC, after: Tree = SPEC, **options: torch.dtype) -> StageSizes:
    nothing = torch.zeros(())
    return measure_stage(Stage(module, **options), (nothing, nothing), before, after)  # type: ignore[arg-type]


def test_a_linear_layer_holds_its_input_and_then_the_output_gradient_too() -> None:
    """F keeps x and makes y. B uses the message, and makes the input gradient. W has one row of sums for the bias.

    BW is autograd's for so small a layer: it makes the gradients of weight and bias too.
    """
    found = sizes(nn.Linear(C, C))
    assert (found.activation_bytes, found.backward_weight_bytes, found.offload_bytes) == (ROWS, 2 * ROWS, ROWS)
    assert found.workspace_bytes == {"F": ROWS, "B": 2 * ROWS, "W": 4 * C, "BW": 2 * ROWS + 4 * (C + 1) * C}


def test_bw_of_a_large_layer_needs_no_room_for_the_gradient_of_its_weight() -> None:
    """Which would be 64 KiB; the row of sums for the bias is gone when the input gradient is made."""
    width = 128
    spec = MessageSpec((N, width), torch.float32)
    found = sizes(nn.Linear(width, width), spec, spec)
    assert found.workspace_bytes["BW"] <= 2 * 4 * N * width + 4 * width


def test_what_autograd_keeps_is_gone_after_b() -> None:
    """Norms are not deferred: only rows of means and deviations, and x, until B."""
    found = sizes(nn.LayerNorm(C))
    assert found.activation_bytes == ROWS + 2 * 4 * N
    assert found.backward_weight_bytes == 0


class Pair(nn.Module):
    """(x, mask) -> (x, mask), x from a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)

    def forward(self, message: Tree) -> Tree:
        x, mask = message
        return self.linear(x) * mask, mask


def test_a_tree_counts_whole_on_its_way_forward_and_its_floats_on_its_way_back() -> None:
    """The mask, of one byte an entry, stays for the product's backward."""
    spec = (SPEC, MessageSpec((N, C), torch.bool))
    found = sizes(Pair(), spec, spec)
    assert found.activation_bytes == ROWS + N * C
    assert found.backward_weight_bytes == 2 * ROWS


class Checkpointed(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layers, x, use_reentrant=False) if self.checkpointed else self.layers(x)
        return y


def test_a_checkpoint_holds_its_input_alone_until_b_runs_it_again() -> None:
    """Then W holds what it does without: both layers' inputs and output gradients, ten activations."""
    plain, found = sizes(Checkpointed(checkpointed=False)), sizes(Checkpointed(checkpointed=True))
    assert (plain.activation_bytes, plain.backward_weight_bytes) == (9 * ROWS, 10 * ROWS)
    assert (found.activation_bytes, found.backward_weight_bytes) == (ROWS, 10 * ROWS)
    assert found.offload_bytes == ROWS
    assert found.workspace_bytes["B"] == plain.workspace_bytes["B"] + 8 * ROWS, "the same peak from another level"


def test_autocast_halves_what_is_kept() -> None:
    """x is kept in bfloat16 alone; the output gradient comes in bfloat16; cast weights are workspace."""
    found = sizes(nn.Linear(C, C), after=MessageSpec((N, C), torch.bfloat16), autocast=torch.bfloat16)
    assert (found.activation_bytes, found.backward_weight_bytes) == (ROWS // 2, ROWS)
    weights = 2 * C * C
    assert found.workspace_bytes["F"] > weights
    assert found.workspace_bytes["B"] > weights
    assert found.workspace_bytes["W"] >= weights, "the product, before it is added in float32"


def test_a_compiled_stage_has_sizes_of_bw_alone() -> None:
    module = nn.Sequential(nn.Linear(C, C))
    module._modules["_orig_mod"] = nn.Identity()
    module.forward = lambda x: module[0](x)  # type: ignore[method-assign]
    found = sizes(module)
    assert (found.activation_bytes, found.backward_weight_bytes) == (ROWS, 0)
    assert found.workspace_bytes.keys() == {"F", "BW"}


def test_measuring_leaves_no_trace_in_the_training() -> None:
    def trained(*, measured: bool) -> list[Tensor]:
        torch.manual_seed(0)
        stage = Stage(nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.Dropout(0.5)), seed=1)
        if measured:
            measure_stage(stage, (torch.zeros(()), torch.zeros(())), SPEC, SPEC)
        x = torch.randn(N, C, generator=torch.Generator().manual_seed(2))
        run = run_one(stage, F_BW, x)
        return [run.outputs[0], *run.weight_gradients, *stage.module.buffers()]

    assert all(torch.equal(a, b) for a, b in zip(trained(measured=True), trained(measured=False), strict=True))


def test_a_chain_of_tensors() -> None:
    inputs, targets = batch(4)
    assert learn_messages(stages_of(chain(4)), 4, inputs[0], targets[0]) == specs(4)


class Fork(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"both": (x, [x.long()])}


def test_trees_and_integers_come_as_they_are() -> None:
    stages = {0: Stage(Fork(), first=True), 1: Stage(nn.Identity()), 2: Stage(nn.Identity())}
    spec = {"both": (MessageSpec((2, 3), torch.float32), [MessageSpec((2, 3), torch.int64)])}
    assert learn_messages(stages, 3, torch.zeros(2, 3), None) == [spec, spec]


class Named(NamedTuple):
    hidden: torch.Tensor


class Making(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: (x, None), "returned NoneType in its output, but only tensors"),
        (lambda x: {"hidden": x, "count": 3}, "returned int in its output, but only tensors"),
        (lambda x: [Named(x)], "returned the named tuple Named, .* Maybe return a dict"),
    ],
)
def test_what_cannot_be_a_message_is_refused(make: Callable[[torch.Tensor], Any], message: str) -> None:
    stages = {0: Stage(Making(make), first=True), 1: Stage(nn.Identity())}
    with pytest.raises(TrainingError, match=message):
        learn_messages(stages, 2, torch.zeros(2, 3), None)


def test_a_process_learns_of_stages_that_are_elsewhere() -> None:
    """The middle one of three processes: it hears the shape before its stage, and says the one behind."""
    stages, said = stages_of(chain(3)), []

    def gather(mine: Any) -> list[Any]:
        said.append(mine)
        return [{"tensor": ["float32", [2, 10]]}, None, None] if mine is None else [None, mine, None]

    assert learn_messages({1: stages[1]}, 3, None, None, gather) == specs(3)
    assert said == [None, {"tensor": ["float32", [2, 4]]}]


def test_learning_changes_no_statistics_and_draws_no_random_numbers() -> None:
    norm = nn.BatchNorm1d(3)
    stages = {0: Stage(nn.Sequential(norm, nn.Dropout(0.5)), first=True), 1: Stage(nn.Identity())}
    before = torch.get_rng_state()
    learn_messages(stages, 2, torch.randn(4, 3, generator=torch.Generator()), None)
    assert norm.num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert norm.training
