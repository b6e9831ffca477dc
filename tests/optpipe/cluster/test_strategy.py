"""Strategies: which are legal, and what is refused with the nearest legal value."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optpipe.cluster.model import load_model
from optpipe.cluster.strategy import Strategy, even_stages, require_legal
from optpipe.errors import InputError

LLAMA = Strategy(tensor=4, context=2, pipeline=4, virtual=5, data=2)


def test_experts_fold_over_the_ranks_of_tensor_parallelism() -> None:
    """The product of all degrees would be 512 x 2 GPUs."""
    model = load_model("deepseek-v3")
    require_legal(Strategy(tensor=2, expert=64, pipeline=4, data=32), model, 256, 8, 4096, 2048)


@pytest.mark.parametrize(
    ("changes", "gpus", "batch", "message"),
    [
        ({"data": 3}, 64, 510, "dp makes dp x tp x cp x pp = 96 GPUs but there are 64. Maybe dp 2."),
        ({"tensor": 3}, 48, 512, "tp is 3 but must divide the 64 heads. Maybe 4."),
        ({"tensor": 16, "data": 1}, 128, 512, "tp is 16 but a node has 8 GPUs. Maybe 8."),
        ({"context": 3}, 96, 512, "cp is 3: 2 x tp x cp = 24 must divide the sequence of 8,192 tokens. Maybe 4."),
        ({"expert": 2}, 64, 512, "ep is 2 but llama-3.1-70b has no experts. Maybe leave it out."),
        ({}, 64, 511, "global_batch is 511 but dp x microbatch size = 2 must divide it. Maybe 512."),
        (
            {"virtual": 40},
            64,
            512,
            "pp is 4, with 40 stages a device, but 80 layers, embedding and head fill 82 stages.",
        ),
    ],
)
def test_what_is_illegal_is_refused_with_the_nearest_value(
    changes: dict[str, int], gpus: int, batch: int, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        require_legal(replace(LLAMA, **changes), load_model("llama-3.1-70b"), gpus, 8, 8192, batch)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_experts_need_as_many_ranks() -> None:
    model = load_model("deepseek-v3")
    with pytest.raises(InputError) as caught:
        require_legal(Strategy(expert=64, pipeline=8, data=16), model, 128, 8, 4096, 2048)
    assert "ep is 64: pp x ep x etp = 512 must divide the 128 GPUs. Maybe 16." in str(caught.value)


def test_first_and_last_stage_have_fewest_layers() -> None:
    assert even_stages(80, 4) == (20, 20, 20, 20)
    assert even_stages(126, 64) == (1, *(2,) * 62, 1)
    assert even_stages(22, 8) == (2, 3, 3, 3, 3, 3, 3, 2)
