"""Work of layers and steps: operations as papers count them, and closed forms of schedules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from optpipe.cluster.costs import INDEX, CostModel, work
from optpipe.cluster.machine import named_machines
from optpipe.cluster.memory import MemoryModel
from optpipe.cluster.model import Model, load_model, read_model
from optpipe.cluster.strategy import Strategy

H100 = named_machines()["h100"].facts
GPT = {"model_type": "gpt2", "vocab_size": 51_200, "n_head": 64, "n_positions": 2048}


def gpt(hidden: int, layers: int) -> Model:
    return read_model(GPT | {"n_embd": hidden, "n_layer": layers})


def test_a_step_takes_six_operations_a_token_and_element_of_its_matrices() -> None:
    model = load_model("llama-3.1-8b")
    costs = CostModel(model, H100, Strategy(data=8), 8192)
    done = costs.step(64, np.ones(len(INDEX)))
    elements = sum(layer.attention.products + layer.feed_forward.products for layer in model.layers)
    elements += model.vocabulary * model.hidden
    operations = done[INDEX["products"]] * H100.operations_bf16_per_s
    assert operations == pytest.approx(6 * elements * 64 * 8192 / 8)
    attention = done[INDEX["attention"]] * H100.operations_bf16_per_s
    assert attention == pytest.approx(6 * 8 * 8192 * 8192 * 4096 * 32)  # 2 products, F and twice that in B, half of it


def test_experts_count_for_the_tokens_that_visit_them() -> None:
    model = load_model("mixtral-8x7b")
    done = CostModel(model, H100, Strategy(expert=8, data=8), 4096).step(8, np.ones(len(INDEX)))
    operations = done[INDEX["experts"]] * H100.operations_bf16_per_s
    assert operations == pytest.approx(6 * 4096 * 2 * 3 * 4096 * 14336 * 32)
    strategy = Strategy(expert=8, data=8, expert_imbalance=1.25)
    busiest = CostModel(model, H100, strategy, 4096).step(8, np.ones(len(INDEX)))
    assert busiest[INDEX["experts"]] == pytest.approx(1.25 * done[INDEX["experts"]])
    kept = [MemoryModel(model, replace(strategy, expert_imbalance=k), 4096, 1) for k in (1.0, 1.25)]
    more = kept[1].layer(model.layers[0]) - kept[0].layer(model.layers[0])
    assert more == pytest.approx(0.25 * 4096 * 2 * 2 * (3 * 14336 + 2 * 4096))


@pytest.mark.parametrize(("hidden", "layers"), [(6144, 48), (12288, 96), (20480, 105), (25600, 128)])
def test_full_over_selective_recomputation(hidden: int, layers: int) -> None:
    """4 / (3 + d) with d = x / (1 + x), x = s / 6h (2205.05198, section 5), halved where attention is causal."""
    model = gpt(hidden, layers)
    only = work(products=1, attention=1)
    seconds = {}
    for recompute in ("full", "selective"):
        strategy = Strategy(tensor=8, recompute=recompute)  # type: ignore[arg-type]
        costs = CostModel(model, H100, strategy, 2048)
        seconds[recompute] = float(costs.layer(model.layers[0]).passes.total @ only)
    x = 2048 / 12 / hidden
    assert seconds["full"] / seconds["selective"] == pytest.approx(4 / (3 + x / (1 + x)))


def test_interleaving_shortens_warm_up_and_cool_down() -> None:
    """(m + p - 1) / (m + (p - 1) / 2) for p = m = 8 is 1.304; torchtitan measured 1.28 on 512 GPUs."""
    model = replace(load_model("llama-3.1-405b"), vocabulary=1)
    only = work(products=1, attention=1)
    plain = Strategy(tensor=8, pipeline=7, data=1)
    costs = [
        CostModel(model, H100, strategy, 8192).step(8, only) @ only
        for strategy in (plain, replace(plain, virtual=2, schedule="interleaved-1f1b"))
    ]
    assert costs[0] / costs[1] == pytest.approx((8 + 6) / (8 + 3), rel=1e-4)


def test_more_gpus_at_more_batch_take_the_same_time_but_for_gradients() -> None:
    """405B in BF16 on 512, 1,024 and 2,048 H100: 19.78, 19.84, 19.87 s."""
    model, h100 = load_model("llama-3.1-405b"), named_machines()["h100"]
    slowdowns = h100.efficiencies_of("bf16", "nvidia-dgxc").slowdowns
    for data, measured in ((4, 19.78), (8, 19.84), (16, 19.87)):
        strategy = Strategy(
            tensor=8, context=2, pipeline=8, virtual=8, data=data, schedule="interleaved-1f1b", microbatch_size=1
        )
        predicted = CostModel(model, H100, strategy, 8192).step(64 * data, slowdowns) @ slowdowns
        assert predicted == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("axis", ["tensor", "context", "expert", "data", "pipeline"])
def test_each_axis_has_communication_of_its_own(axis: str) -> None:
    model = load_model("mixtral-8x7b")
    strategy = replace(Strategy(data=8), **{axis: 2})  # type: ignore[arg-type]
    ones = np.ones(len(INDEX))
    assert CostModel(model, H100, strategy, 4096).step(64, ones)[INDEX[axis]] > 0
    alone = CostModel(model, H100, Strategy(), 4096).step(64, ones)
    assert alone[INDEX[axis]] == 0
