"""Strategies: layers of their stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest

from optpipe.cluster.model import load_model
from optpipe.cluster.strategy import Strategy, Vocabulary, even_stages


def test_first_and_last_stage_have_fewest_layers() -> None:
    assert even_stages(80, 4) == (20, 20, 20, 20)
    assert even_stages(126, 64) == (1, *(2,) * 62, 1)
    assert even_stages(22, 8) == (2, 3, 3, 3, 3, 3, 3, 2)


@pytest.mark.parametrize(
    ("stages", "sizes"),
    [
        (1, (62,)),
        (4, (16, 16, 16, 13 + 1)),
        (8, (*[8] * 7, 5 + 1)),
        (16, (*[4] * 15, 1 + 1)),
        (32, (1, *[2] * 30, 0 + 1)),
        (63, (0, *[1] * 61, 0 + 1)),
        (64, (0, *[1] * 61, 1, 0)),
    ],
)
def test_a_stage_that_predicts_further_tokens(stages: int, sizes: tuple[int, ...]) -> None:
    """Layers of DeepSeek-V3 as Megatron Bridge 0.3 has them for 4, 8 and 16 stages."""
    assert Strategy(pipeline=stages).layers_of_stages(load_model("deepseek-v3")) == sizes


def test_every_division_has_layers_in_all_stages() -> None:
    model = load_model("deepseek-v3")
    for count, predicted, place in product(range(1, 9), range(4), get_args(Vocabulary)[:2]):
        one = replace(model, layers=model.layers[:count], prediction_layers=model.prediction_layers * predicted)
        for stages in range(2, one.most_stages + 1):
            sizes = Strategy(pipeline=stages, vocabulary=place).layers_of_stages(one)
            assert (len(sizes), sum(sizes)) == (stages, count + predicted)
            assert all(sizes[1:-1]), sizes
            assert (sizes[-1] == 0) >= (place == "own")
            assert [size for size in sizes if size][-1] >= predicted


def test_an_output_layer_of_its_own_stage() -> None:
    one = Strategy(pipeline=4, virtual=2, vocabulary="own")
    assert one.layers_of_stages(load_model("llama-3.1-70b")) == (11, 11, 11, 12, 12, 12, 11, 0)
