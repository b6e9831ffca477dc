"""Layers of a strategy: the same costs and bytes as the step's, cut and planned as measured ones are."""

from __future__ import annotations

import pytest

from optpipe.cluster.costs import CostModel
from optpipe.cluster.layers import strategy_layers, strategy_partition
from optpipe.cluster.machine import named_machines
from optpipe.cluster.model import load_model
from optpipe.cluster.strategy import Strategy
from optpipe.export.megatron_layout import layout_of_partition
from optpipe.partition import Batching, Partition, build_problem
from solver.solve import solve

STRATEGY = Strategy(tensor=4, context=2, pipeline=4, virtual=5, data=2, schedule="interleaved-1f1b")


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


def test_a_published_schedule_of_them_takes_what_the_closed_form_says() -> None:
    model, h100 = load_model("llama-3.1-70b"), named_machines()["h100"]
    layers = strategy_layers(model, h100, STRATEGY, 8192).model_copy(update={"memory_bytes": None})
    problem = build_problem(layers, strategy_partition(model, STRATEGY), Batching(1, 64))
    assert problem is not None
    slowdowns = h100.efficiencies_of("bf16").slowdowns
    costs = CostModel(model, h100.facts, STRATEGY, 8192)
    expected_us = float((costs.step(128, slowdowns) - costs.replicas(64)) @ slowdowns) * 1e6
    assert solve(problem, "interleaved-1f1b").value_us == pytest.approx(expected_us, rel=0.03)
