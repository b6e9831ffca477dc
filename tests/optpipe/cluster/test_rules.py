"""Rules of strategies: which are legal, and what is refused with the rule and the nearest legal values."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from optpipe.cluster.model import load_model
from optpipe.cluster.rules import Rules
from optpipe.cluster.strategy import Strategy
from optpipe.errors import InputError
from tests.sample import some

LLAMA = Strategy(tensor=4, context=2, pipeline=4, virtual=5, data=2)
DEEPSEEK = Rules(load_model("deepseek-v3"), 256, 8, 4096, 2048)


def test_experts_fold_over_the_ranks_of_tensor_parallelism() -> None:
    """The product of all degrees would be 512 x 2 GPUs."""
    DEEPSEEK.require(Strategy(tensor=2, expert=64, pipeline=4, data=32))


@pytest.mark.parametrize(
    ("changes", "gpus", "batch", "message"),
    [
        ({"data": 3}, 64, 510, "dp makes dp x tp x cp x pp = 96 GPUs but there are 64. Maybe dp 2."),
        ({"tensor": 3}, 48, 512, "tp is 3 but must divide the 64 heads. Maybe 2 or 4."),
        ({"tensor": 3}, 64, 512, "tp is 3 but must divide the 64 heads and the 64 GPUs. Maybe 2 or 4."),
        ({"tensor": 16, "data": 1}, 128, 512, "tp is 16 but a node has 8 GPUs. Maybe 8."),
        ({"context": 3}, 96, 512, "cp is 3: 2 x tp x cp = 24 must divide the sequence of 8,192 tokens. Maybe cp 2,"),
        ({"pipeline": 5}, 64, 512, "pp is 5 but must divide the 64 GPUs. Maybe 4 or 8."),
        ({"pipeline": 32}, 64, 512, "gpus is 64 but tp x cp x pp = 256 must divide it. Maybe pp 8,"),
        ({"expert": 2}, 64, 512, "ep is 2 but llama-3.1-70b has no experts. Maybe leave it out."),
        ({"expert_tensor": 2}, 64, 512, "etp is 2 but llama-3.1-70b has no experts. Maybe leave it out."),
        (
            {"microbatch_size": 5},
            64,
            512,
            "microbatch_size is 5 but must divide the 512 sequences of the global batch.",
        ),
        (
            {},
            64,
            511,
            "global_batch is 511 but dp x microbatch size = 2 must divide it. Maybe a global batch of 510 or",
        ),
        (
            {"virtual": 40},
            64,
            512,
            "pp is 4, with 40 stages a device, but 80 layers, embedding and head fill 82 stages.",
        ),
    ],
)
def test_what_is_illegal_is_refused_with_the_nearest_values(
    changes: dict[str, int], gpus: int, batch: int, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        Rules(load_model("llama-3.1-70b"), gpus, 8, 8192, batch).require(replace(LLAMA, **changes))  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "sequence", "message"),
    [
        (Strategy(virtual=2, data=64), 8192, "vpp is 2 but pp is 1: one device has all layers. Maybe 1."),
        (
            Strategy(tensor=4, data=16),
            8190,
            "tp is 4: tp = 4 must divide the sequence of 8,190 tokens. Maybe tp 2, or a sequence of 8,188 or 8,192.",
        ),
    ],
)
def test_the_degree_that_was_chosen_is_named(strategy: Strategy, sequence: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Rules(load_model("llama-3.1-70b"), 64, 8, sequence, 512).require(strategy)
    assert str(caught.value) == message


@pytest.mark.parametrize(("name", "most"), [("gpt2-xl", 1024), ("gpt-3-175b", 2048), ("llama-2-7b", 0)])
def test_learned_positions_are_the_longest_sequence(name: str, most: int) -> None:
    def said(sequence: int) -> list[str]:
        return [str(fault) for fault in Rules(load_model(name), 8, 8, sequence, 64).faults(Strategy(data=8))]

    assert said(most or 2**20) == []
    expected = f"sequence is {2 * most:,} but {name} learns {most:,} positions. Maybe {most:,}, or a model with rotary"
    assert [text.startswith(expected) for text in said(2 * most or 2**21)] == [True] * (most > 0)


def test_stages_of_multi_token_prediction_count() -> None:
    with pytest.raises(InputError) as caught:
        Rules(load_model("deepseek-v3"), 65, 8, 4096, 65).require(Strategy(pipeline=65))
    assert str(caught.value).startswith(
        "pp is 65 but 62 layers (1 of multi-token prediction), embedding and head fill 64 stages. Maybe 13."
    )


def test_every_wrong_degree_is_named() -> None:
    wrong = replace(LLAMA, tensor=3, pipeline=7, microbatch_size=5)
    faults = Rules(load_model("llama-3.1-70b"), 64, 8, 8192, 512).faults(wrong)
    assert [fault.pointer for fault in faults] == ["tp", "pp", "microbatch_size"]


def test_experts_need_as_many_ranks() -> None:
    with pytest.raises(InputError) as caught:
        Rules(load_model("deepseek-v3"), 128, 8, 4096, 2048).require(Strategy(expert=64, pipeline=8, data=16))
    assert str(caught.value) == "ep is 64: pp x ep x etp = 512 must divide the 128 GPUs. Maybe ep 16, or pp 2."


def test_legal_is_what_the_rules_say() -> None:
    """Against the rules as sentences, on grids of degrees."""
    for name, gpus, sequence, batch in (("mixtral-8x7b", 48, 6 * 512, 96), ("qwen2.5-7b", 56, 7 * 256, 60)):
        model = load_model(name)
        heads, experts = model.layers[0].attention.heads, model.layers[0].feed_forward.experts
        rules = Rules(model, gpus, 8, sequence, batch)
        values = [1, 2, 3, 4, 6, 7, 8]
        for tp, cp, ep, etp, pp, size in some([*product(values, values, [1, 2, 3, 8], [1, 2, 3], values, [1, 2, 5])]):
            data = max(1, gpus // (tp * cp * pp))
            one = Strategy(tp, cp, ep, etp, pp, data=data, microbatch_size=size)
            legal = data * tp * cp * pp == gpus and heads % tp == 0 and tp <= 8
            legal &= sequence % (tp * cp * (2 if cp > 1 else 1)) == 0 and batch % (data * size) == 0
            legal &= gpus % (pp * ep * etp) == 0 and experts % ep == 0 if experts else ep == etp == 1
            assert (not list(rules.faults(one))) == legal, one


@pytest.mark.parametrize(
    ("name", "strategy", "message"),
    [
        ("llama-3.1-70b", Strategy(data=16, vocabulary="own"), "vocabulary is own but pp is 1: one device has all"),
        ("llama-3.1-70b", Strategy(data=16, vocabulary="spread"), "vocabulary is spread but pp is 1: one device has"),
        ("deepseek-v3", Strategy(pipeline=4, data=4, vocabulary="spread"), "deepseek-v3 predicts further tokens by"),
        (
            "mixtral-8x7b",
            Strategy(pipeline=2, data=8, expert=8, overlap="yes", vocabulary="spread"),
            "vocabulary is spread but overlap is yes: a stage whose backward waits for all devices is in no block.",
        ),
        (
            "mixtral-8x7b",
            Strategy(pipeline=16, virtual=3, vocabulary="spread"),
            "pp is 16, with 3 stages a device, but 32 layers and embedding fill 33 stages. Maybe vpp 2, or pp 8.",
        ),
    ],
)
def test_places_of_the_output_layer(name: str, strategy: Strategy, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Rules(load_model(name), 16, 8, 4096, 64).require(strategy)
    assert message in str(caught.value)
