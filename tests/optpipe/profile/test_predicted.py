"""Layers predicted for a machine without running them: their bytes are those of a run, their times of counted work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optpipe.cluster.machine import SHARES, Machine
from optpipe.errors import InputError, TrainingError
from optpipe.layers import Layer, LayerProfile
from optpipe.profile.predicted import predict_layers
from optpipe.profile.subject import Subject
from optpipe.profile.without_values import WithoutValues
from tests.optpipe.profile.subjects import Masked, experts, measured, perceptron

TOKENS, WIDTH, WORDS = 6, 16, 40
OPERATIONS_PER_US, BYTES_PER_US = 1e3, 1e2
FACTS = {"gpus_per_node": 8, "memory_bytes": 2**30, "memory_bytes_per_s": 1e6 * BYTES_PER_US, "link_bytes_per_s": 1e9}
FACTS |= {"operations_bf16_per_s": 1e6 * OPERATIONS_PER_US}
PERFECT: dict[str, Any] = dict.fromkeys(SHARES, 1.0) | {"launch_us": 0, "step_us": 0}
MACHINE = Machine.from_data(
    {"format": "optpipe.machine/1", "name": "perfect", "facts": FACTS, "efficiencies": [PERFECT]}, "a test"
)


class Words(nn.Module):
    """Embeddings of all words but the first; positions count while there are more than two."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        x, at = self.words(words), torch.arange(words.shape[1])
        if at.max() > 1:
            x = x + self.positions(at)
        kept: Tensor = x * (words != 0).unsqueeze(-1)
        return kept


class Block(nn.Module):
    """Causal attention and dropout around a residual, with a convolution in between."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm, self.dropout = nn.BatchNorm1d(TOKENS), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).transpose(1, 3).unbind(2)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.mix(attended.transpose(1, 2).flatten(2).transpose(1, 2))
        added: Tensor = x + self.dropout(mixed.transpose(1, 2))
        return added


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)[0]
        return found


def words() -> Subject:
    torch.manual_seed(0)
    inputs, targets = torch.randint(WORDS, (2, TOKENS)), torch.randint(WORDS, (2 * TOKENS,))
    stages = [Words(), Block(), Block(), Block(), nn.Linear(WIDTH, WORDS)]
    return Subject("words", stages, inputs, targets, lambda y, of: nn.functional.cross_entropy(y.flatten(0, 1), of))


def masked() -> Subject:
    torch.manual_seed(0)
    inputs = torch.randn(8, WIDTH), torch.ones(8, WIDTH, dtype=torch.bool)
    return Subject(
        "masked", [Masked(), Masked()], inputs, torch.randn(8, WIDTH), lambda y, of: nn.functional.mse_loss(y[0], of)
    )


def predicted(subject: Subject, machine: Machine = MACHINE) -> LayerProfile:
    return predict_layers(WithoutValues(), subject, machine, None, (), None)


def all_bytes(layer: Layer) -> dict[str, Any]:
    return {name: value for name, value in layer.to_data().items() if name.endswith("bytes")}


@pytest.mark.parametrize("build", [words, masked, perceptron])
def test_bytes_are_those_of_a_run(build: Callable[[], Subject]) -> None:
    subject = build()
    run, _ = measured(subject, range(len(subject.stages)), rounds=1)
    found = predicted(build())
    assert [*map(all_bytes, found.each_layer)] == [*map(all_bytes, run.layers().each_layer)]
    if build is words:
        assert [layer.repeat for layer in found.layers] == [1, 3, 1]  # equal ones are run once
    assert "predicted for perfect, nothing measured" in found.source


def test_layers_that_differ_in_an_attribute_alone_are_told_apart() -> None:
    subject = words()
    subject.stages[2].dropout.p = 0.0  # type: ignore[union-attr]
    assert [layer.repeat for layer in predicted(subject).layers] == [1, 1, 1, 1, 1]


def test_times_are_operations_and_bytes_at_the_rates_of_the_machine() -> None:
    rows, width, inner = 8, 16, 32
    stages = [nn.Linear(width, inner, bias=False), nn.Sequential(nn.GELU(), nn.Linear(inner, width, bias=False))]
    inputs, targets = torch.randn(rows, width), torch.randn(rows, width)
    subject = Subject("two products", [stage.bfloat16() for stage in stages], inputs.bfloat16(), targets, _sum)
    first, second = predicted(subject).layers
    product_us = 2 * rows * width * inner / OPERATIONS_PER_US
    assert first.forward_us == pytest.approx(product_us, abs=0.1)
    assert first.backward_input_us == 0  # the first layer's input has no gradient
    accumulated_us = width * inner * (2 + 4 + 4) / BYTES_PER_US  # a product in 16 bits, added to a sum in 32
    assert first.backward_weight_us == pytest.approx(product_us + accumulated_us, abs=0.1)
    gelu_us = 2 * rows * inner * 2 / BYTES_PER_US
    loss_us = (rows * width * 2 + 2) / BYTES_PER_US
    assert second.forward_us == pytest.approx(product_us + gelu_us + loss_us, abs=0.3)


def _sum(output: Tensor, _target: Tensor) -> Tensor:
    return output.sum()


def test_causal_attention_is_half_of_all_pairs_and_twice_as_much_in_b() -> None:
    class Attention(nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.scale, self.causal = nn.Parameter(torch.ones(1, dtype=torch.bfloat16)), causal

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=self.causal)

    heads, tokens, width = 2, 64, 32
    x = torch.randn(1, heads, tokens, width, dtype=torch.bfloat16)
    passes = []
    for causal in (True, False):
        stages = [Attention(causal), nn.Identity()]
        [layer, _] = predicted(Subject("attention", stages, x, x, _sum)).layers
        passes.append((layer.forward_us, layer.backward_input_us))
    whole_us = 4 * heads * tokens**2 * width / OPERATIONS_PER_US
    assert passes[1][0] - passes[0][0] == pytest.approx(whole_us / 2, abs=0.2)
    assert passes[1][1] - passes[0][1] == pytest.approx(whole_us, abs=0.2)


class Positive(nn.Module):
    """Writes into booleans what depends on other numbers: these would keep values that are wrong."""

    def forward(self, x: Tensor) -> Tensor:
        picked = torch.zeros(x.shape, dtype=torch.bool)
        return x * torch.gt(x.detach(), 0, out=picked)


def test_buffers_of_what_is_recomputed_are_refused() -> None:
    stages = [Words(), nn.Sequential(Block(), Block()), nn.Linear(WIDTH, WORDS)]
    with pytest.raises(TrainingError, match="a block has buffers, and without values it is not known which"):
        predict_layers(WithoutValues(), replace(words(), stages=stages), MACHINE, None, ("selective",), None)


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (
            experts(),
            r"stages\[1\] \(Experts\) depends on the data: aten\.\S+ needs values at odd_stages\.py:\d+\. Maybe",
        ),
        (
            Subject("positive", [nn.Linear(4, 4), Positive()], torch.randn(2, 4), torch.zeros(2, 4), _sum),
            r"stages\[1\] \(Positive\) depends on the data: aten\.gt\.\S+ needs values at test_predicted\.py:\d+",
        ),
        (
            Subject("recurrent", [Recurrent(), Recurrent()], torch.randn(3, 2, WIDTH), torch.zeros(3, 2, WIDTH), _sum),
            r"stages\[0\] \(Recurrent\) keeps what only a run tells: a workspace of aten.mkldnn_rnn_layer",
        ),
        (
            Subject("wide", [nn.Linear(4, 4).double()], torch.randn(2, 4).double(), torch.zeros(2, 4), _sum),
            r"--machine has no rate for products in torch.float64. Maybe",
        ),
    ],
)
def test_what_only_a_run_tells_is_refused_by_name(subject: Subject, message: str) -> None:
    with pytest.raises(InputError, match=message):
        predicted(subject)
