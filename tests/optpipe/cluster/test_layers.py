"""Layers of a strategy: the same costs and bytes as the step's, cut and planned as measured ones are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optpipe.cluster.costs import CostModel
from optpipe.cluster.layers import strategy_layers, strategy_partition
from optpipe.cluster.machine import named_machines
from optpipe.cluster.model import load_model
from optpipe.cluster.strategy import Strategy
from optpipe.export.megatron_layout import layout_of_partition
from optpipe.layers import LayerProfile
from optpipe.partition import Batching, Partition, build_problem
from optpipe.simulate import simulate
from solver.solve import solve

STRATEGY = Strategy(tensor=4, context=2, pipeline=4, virtual=5, data=2, schedule="interleaved-1f1b")
OVERLAPPED = Strategy(expert=16, pipeline=4, virtual=3, data=2, overlap="yes", schedule="interleaved-1f1b")
IN_A_V = Strategy(expert=8, pipeline=4, virtual=2, data=2, overlap="yes", schedule="dualpipe-v")


@pytest.mark.parametrize("name", ["llama-3.1-70b", "deepseek-v3", "gpt2-xl"])
def test_layers_add_up_to_the_work_of_the_devices(name: str) -> None:
    model, h100 = load_model(name), named_machines()["h100"]
    strategy = Strategy(pipeline=4, data=8)
    layers = strategy_layers(model, h100, strategy, 1024)
    slowdowns = h100.efficiencies_of("bf16").slowdowns
    devices = CostModel(model, h100.facts, strategy, 1024).devices()
    whole_us = sum(one.forward_us + one.backward_input_us + one.backward_weight_us for one in layers.each_layer)
    assert whole_us == pytest.approx(float(devices.sum((0, 1)) @ slowdowns) * 1e6)
    assert len(layers.each_layer) == len(model.layers) + 2
    halves = Partition((len(model.layers), 2), (0, 1))
    assert layout_of_partition(halves, layers) == f"Et*{len(model.layers) - 1}|t{'m' * model.predicted_tokens}L"


@pytest.mark.parametrize(
    ("name", "strategy", "hidden"),
    [("llama-3.1-70b", STRATEGY, 0), ("qwen3-30b-a3b", OVERLAPPED, 0.1), ("deepseek-v2-lite", IN_A_V, 0.03)],
)
def test_a_published_schedule_of_them_takes_what_the_closed_form_says(
    name: str, strategy: Strategy, hidden: float
) -> None:
    model, h100 = load_model(name), named_machines()["h100"]
    layers = strategy_layers(model, h100, strategy, 8192).model_copy(update={"memory_bytes": None})
    problem = build_problem(layers, strategy_partition(model, strategy), Batching(1, 64))
    assert problem is not None
    slowdowns = h100.efficiencies_of("bf16").slowdowns
    costs = CostModel(model, h100.facts, strategy, 8192)
    expected_us = float((costs.step(128, slowdowns) - costs.replicas(64)) @ slowdowns) * 1e6
    schedule = solve(problem, strategy.schedule)
    assert schedule.value_us == pytest.approx(expected_us, rel=0.03)
    last = {s for s, stage in enumerate(problem.stages) if stage.device == strategy.pipeline - 1}
    assert sum(op.stage in last for op in schedule.orders.blocks) == strategy.blocks(64)
    apart_us = simulate(problem, replace(schedule.orders, blocks={})).value_us
    assert schedule.value_us <= (1 - hidden) * apart_us


def test_a_block_takes_the_longer_of_each_pair_of_parts() -> None:
    """Attention runs while the other combines, experts while it dispatches; the last layer of the backward is first."""
    costs = dict.fromkeys(("activation_bytes", "backward_weight_bytes"), 0)
    times = {"forward_us": 20, "backward_input_us": 20, "backward_weight_us": 10}
    dense = {"name": "dense"} | costs | times
    first = dense | {"parts": {"forward_us": [5, 6, 3, 4], "backward_us": [8, 6, 7, 5]}}
    second = dense | {"parts": {"forward_us": [1, 2, 9, 8], "backward_us": [4, 1, 2, 3]}}
    layers = LayerProfile.from_data({"format": "optpipe.layers/1", "layers": [dense, first, second]})
    problem = build_problem(layers, Partition((1, 2), (0, 0)), Batching(1, 4))
    assert problem is not None
    saved = min(5, 3) + min(6, 2) + min(3, 1) + min(4, 4) + min(1, 5) + min(2, 7) + min(9, 6) + min(8, 8)
    assert problem.block_us == {(1, 1): 2 * 50 - saved}
